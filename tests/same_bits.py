"""Does this code compute the bits of another version? Fifteen configurations, one process each.

    python tests/same_bits.py OTHER [NAME ...]      # OTHER: a folder with the other version

OTHER has checkpoints of the same format. Each configuration is trained by both from the same text;
then weights, moments, averages, random state and every computed field of every row must be equal. A
line each; exit code 1 if one differs. Not a test of the suite, which has no other version."""

import sys
import tempfile
from pathlib import Path

from conftest import REPO, fingerprint, make_dataset, pydoc_text, rows, start
from test_resume import WITH

COMMON = (
    "--dataset=text --device=cpu --compile=false --dtype=float32 --max_steps=24 --warmup_steps=3 "
    "--eval_interval=8 --eval_tokens=4000 --save_interval=10 --log_interval=4 --report=false"
).split()
CONFIGURATIONS = {  # name: flags
    "plain": "config/shakespeare_plain.py --max_steps=40",
    "shakespeare": "config/shakespeare.py",
    "extras": "config/shakespeare_extras.py",
    "extras, compiled": "config/shakespeare_best.py --compile=true",
    "accumulation, dropout": "--dropout=0.1 --batch_size=4 --accum_steps=3 --n_layer=2",
    "workers": "--num_workers=2 --dropout=0.1",
} | {name: flags for name, (flags, fork) in WITH.items() if not fork and name != "init_from"}


def train(repo, folder, data_dir, flags):
    """Train in `repo`. Returns {part: its bits} of the last checkpoint, and the rows. Some of the
    configurations have knobs of examples/ngram.py."""
    script = "examples/ngram.py" if "extras" in flags or "best" in flags else "train.py"
    where = [f"--data_dir={data_dir}", f"--out_dir={folder}"]
    known = [flag for flag in COMMON if not flag.startswith("--max_steps") or "max" not in flags]
    words = [sys.executable, script, *known, *where, *flags.split()]
    log = folder.with_suffix(".log")
    process = start(words, log, cwd=repo, env={"PYTHONPATH": str(repo)})
    if process.wait(3600):
        sys.exit(f"{' '.join(words)} failed:\n{log.read_text()[-3000:]}")
    return fingerprint(max(folder.glob("ckpt_*.pt"))), rows(folder)


def differences(bits, logs):
    """What differs, in words."""
    (then, now), (rows_then, rows_now) = bits, logs
    words = [name for name in now if now[name] != then[name]]
    if len(rows_now) != len(rows_then):
        words.append(f"{len(rows_then)} rows then, {len(rows_now)} now")
    for old, new in zip(rows_then, rows_now, strict=False):
        for name in old.keys() | new.keys():
            if old.get(name) != new.get(name):
                words.append(f"{name} of step {new['step']}: {old.get(name)}, {new.get(name)}")
    return words[:6]


def main(other, *names):
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        data_dir = make_dataset(Path(folder, "data"), "text", pydoc_text()[:100_000])
        for number, name in enumerate(names or CONFIGURATIONS):
            runs = []
            for repo in (Path(other).resolve(), REPO):
                out_dir = Path(folder, f"{number}_{len(runs)}")
                runs.append(train(repo, out_dir, data_dir, CONFIGURATIONS[name]))
            found = differences(*zip(*runs, strict=True))
            same = f"the same bits, {len(runs[1][1])} rows"
            print(f"{name:<24}", "; ".join(found) or same, flush=True)
            failed = failed or bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
