"""Many edits: which are no luck? Trains each patch beside the code as it is, on the same seeds, and
keeps by e-BH: of what it keeps, at most 5% are luck on average.

    python examples/ledger.py ideas/*.patch --run="config/shakespeare_fast.py --max_steps=40"
"""

import json
import shlex
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))
from plumbing.cli import configured, fail, run_script  # noqa: E402
from reporting.verdicts import SHARE, e_value, kept_by_e_bh  # noqa: E402

out_dir = "../out/ledger"  # of the ledger, a copy of the code for each patch, and all runs
run = "config/shakespeare_fast.py"  # config file and flags of every run
max_seeds = 20  # for each patch, [4, inf); looks are rows of ledger.jsonl, and are not repeated
LEFT_OUT = shutil.ignore_patterns(".git", "__pycache__", "out", "data", "tests", "records")


def needs_a_look(gains: list, patches: int) -> bool:
    """May another seed change what becomes of a patch? gains: its losses minus the code's."""
    is_shown = e_value(gains) >= patches / SHARE  # kept, even if no other is
    return len(gains) < 4 or not is_shown and sum(gains) < 0 and len(gains) < max_seeds


def last_loss(code: Path, folder: Path, seed: int) -> float:
    flags = [f"--seed={seed}", f"--out_dir={folder}", f"--data_dir={REPO}/data", "--report=false"]
    subprocess.run([sys.executable, "train.py", *shlex.split(run), *flags], cwd=code, check=True)
    rows = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [row["val_loss"] for row in rows if row["kind"] == "eval"][-1]


def patched(patch: Path, home: Path) -> Path:
    """A copy of the code with that patch; another one if the patch is edited."""
    code = home / f"{patch.stem}_{sha256(patch.read_bytes()).hexdigest()[:8]}" / "code"
    if not code.exists():
        copy = code.with_name("copy")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(REPO, copy, ignore=LEFT_OUT)
        if subprocess.run(["patch", "-sp1", "-i", patch], cwd=copy).returncode:
            fail(f"{patch} does not apply to the code as it is")
        copy.rename(code)
    return code


def main(argv: list[str] | None = None) -> None:
    names, gains = [], {}
    with configured(globals(), argv=argv, names=names):
        home = Path(out_dir)
        for name in dict.fromkeys(names):
            code, gains[name] = patched(Path(name).resolve(), home), []
            while needs_a_look(gains[name], len(names)):
                seed = len(gains[name])
                before = last_loss(REPO, home / "code as it is" / str(seed), seed)
                gains[name].append(last_loss(code, code.parent / str(seed), seed) - before)
                row = {"patch": name, "gains": gains[name], "e": e_value(gains[name])}
                with open(home / "ledger.jsonl", "a", encoding="utf-8") as ledger:
                    ledger.write(json.dumps(row) + "\n")
        places = kept_by_e_bh([e_value(each) for each in gains.values()])
        kept = [name for n, name in enumerate(gains) if n in places and sum(gains[name]) < 0]
        print(f"kept {len(kept)} of {len(gains)}: {', '.join(kept)}")


if __name__ == "__main__":
    sys.exit(run_script(main))
