"""How many bugs does check.py find, and by which line? How many sound forks does it let pass?

    python tests/bugs.py tests/bugs.toml [WORDS ...]   # bugs, in a copy of the code: expected NO-GO
    python tests/bugs.py tests/sound [WORDS ...]       # scripts: expected GO, or GO with --accept

WORDS choose by name. A bug is an edit, `old` to `new` in `file`, or a `script` of its own. A sound fork
that check.py does not let pass is asked again with --accept of the lines that it named."""

import os
import re
import runpy
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path
from pydoc_data.topics import topics

import run_page
import torch

REPO = Path(__file__).resolve().parent.parent
# That of docs/forks.md: two networks and two optimizers in one step; here on other rows
GAN = run_page.scripts(REPO / "docs/forks.md")["gan.py"].replace("import houses", "import shared")
GAN += """
rows = shared.np.random.RandomState(0).randn(600, 3).astype("float32") + 2
shared.use([*zip(rows, rows, strict=True)])
"""
FLAGS = """--dataset=small --device=cpu --dtype=float32 --compile=false --n_embd=64 --n_head=4
 --block_size=32 --batch_size=8 --optimizer=muon --peak_lr=1e-2 --min_lr=1e-4 --warmup_steps=10
 --max_steps=80""".split()


def main(argv):
    source, *words = argv
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        data = made_dataset(Path(scratch))
        for case in cases_of(source):
            if words and not any(word in case["name"] for word in words):
                continue
            code, names, seconds = judged(case, data)
            how = "NO-GO" if code == 1 else "GO" if code == 0 else f"exit {code}"
            if "is_sound" in case and code == 1:
                code, rest, _ = judged(case, data, f"--accept={','.join(names)}")
                how = f"GO with --accept={','.join(names)}" if code == 0 else f"NO-GO, then {rest}"
            results.append(re.sub("[=,].*", "", how))
            print(f"{how:8} {case['name']}: {', '.join(names)} ({seconds:.1f} s)", flush=True)
    for how in sorted({*results}):
        print(f"{results.count(how)} of {len(results)}: {how}")


def cases_of(source):
    if str(source).endswith(".toml"):
        return tomllib.loads(Path(source).read_text(encoding="utf-8"))["bug"]
    paths = [path for path in sorted(Path(source).glob("*.py")) if path.name != "shared.py"]
    scripts = {path.stem: path.read_text() for path in paths} | {"other_gan": GAN}
    return [{"name": name, "is_sound": True, "script": code} for name, code in scripts.items()]


def made_dataset(scratch):
    """A folder with the first 60,000 characters of a text as data, a checkpoint of a run on them, and
    a copy of the code, so that this one may be edited meanwhile."""
    code = scratch / "code"
    for pattern in ("*.py", "checks/*.py", "tests/sound/shared.py"):
        for path in REPO.glob(pattern):
            place = code / path.relative_to(REPO).as_posix().removeprefix("tests/sound/")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)
    text = scratch / "small.txt"
    text.write_text("\n".join(topics.values())[:60_000])
    python(code, "prepare_data.py", "small", f"--input={text}", f"--data_dir={scratch}/data")
    flags = [f"--data_dir={scratch}/data", *FLAGS, "--max_steps=20", f"--out_dir={scratch}/other"]
    code, output = python(code, "train.py", *flags, "--report=false")
    assert code == 0, output
    shutil.copy(scratch / "other" / "ckpt_00000020.pt", scratch / "other.pt")
    return scratch


def judged(case, scratch, *more):
    """(exit code, names of the lines with a fault, CPU seconds) of check.py on a copy of the code
    with this bug or script."""
    with tempfile.TemporaryDirectory(dir=scratch) as copy:
        shutil.copytree(scratch / "code", copy, dirs_exist_ok=True)
        flags = case.get("flags", "").format(scratch=scratch).split()
        if "file" in case:
            path = Path(copy, case["file"])
            source = path.read_text(encoding="utf-8")
            assert source.count(case["old"]) == 1, f"{case['name']}: old text not found once"
            path.write_text(source.replace(case["old"], case["new"]))
        else:
            Path(copy, "fork.py").write_text(case["script"] + "import train\n")
            first = re.search("^# flags: (.*)", case["script"], re.MULTILINE)
            flags = ["fork.py", *(first[1].split() if first else []), *flags]
        before = os.times()
        words = [*FLAGS, f"--data_dir={scratch}/data", *flags, *more]
        code, output = python(Path(copy), "check.py", *words)
        seconds = sum(os.times()[2:4]) - sum(before[2:4])
        names = re.findall(r"^[✗?]+ (\w+):", output, re.MULTILINE)
        if code not in (0, 1) or os.environ.get("SHOW"):
            print(output)
        return code, names, seconds


def python(folder, script, *words, cwd=None):
    """(exit code, output) of `python SCRIPT WORDS` in `folder`: in a fork of this process, which has
    imported torch already."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        child = os.fork()
        if child:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            out.seek(0)
            return code, out.read()
        try:
            for number, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(out.fileno(), number)
                setattr(sys, name, open(number, "w", buffering=1, encoding="utf-8"))
            for name in [*sys.modules]:  # to be imported from this copy of the code
                if (REPO / f"{name}.py").exists() or name.startswith("checks"):
                    del sys.modules[name]
            os.chdir(cwd or folder)
            torch.set_num_threads(1)
            sys.path.insert(0, str(folder))
            sys.argv = [str(folder / script), *map(str, words)]
            try:
                runpy.run_path(sys.argv[0], run_name="__main__")
            except Exception:
                sys.excepthook(*sys.exc_info())  # plumbing's, which exits
        except SystemExit as end:
            os._exit(end.code or 0)
        finally:
            os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
