"""Does this code compute the bits of another version? Fifteen configurations, one process each.

    python tests/same_bits.py OTHER [NAME ...]      # OTHER: a folder with the other version

OTHER is commit 8f60156, or a later one. Each configuration is trained by both from the same text;
then weights, moments, random state and every computed field of every row must be equal. A line
each; exit code 1 if one differs. Averages are off: they warm up since. Not a test of the suite,
which has no other version.
"""

import sys
import tempfile
from pathlib import Path

import torch
from conftest import REPO, digest, make_dataset, pydoc_text, rows, start
from torch.utils._pytree import tree_map

COMMON = (
    "--dataset=text --device=cpu --compile=false --dtype=float32 --max_steps=24 --warmup_steps=3 "
    "--eval_interval=8 --eval_tokens=4000 --save_interval=10 --log_interval=4 --report=false"
).split()
PLATEAU = "--plateau_factor=0.5 --plateau_patience=1 --min_delta=0.2 --eval_interval=2"
CONFIGURATIONS = {  # name: flags
    "plain": "config/shakespeare_plain.py --max_steps=40",
    "shakespeare": "config/shakespeare.py",
    "extras": "config/shakespeare_extras.py",
    "extras, compiled": "config/shakespeare_best.py --compile=true",
    "accumulation, dropout": "--dropout=0.1 --batch_size=4 --accum_steps=3 --n_layer=2",
    "adamw": "--optimizer=adamw",
    "adam": "--optimizer=adam --schedule=onecycle",
    "sgd": "--optimizer=sgd --peak_lr=0.1 --schedule=step --step_size=5",
    "momentum": "--optimizer=momentum --peak_lr=0.1 --schedule=step",
    "muon": "--optimizer=muon --n_layer=2 --grad_checkpoint=true --label_smoothing=0.1",
    "bfloat16": "--dtype=bfloat16 --dropout=0.1",
    "float16": "--dtype=float16",
    "float16, muon": "--dtype=float16 --optimizer=muon",
    "workers": "--num_workers=2 --dropout=0.1",
    "plateau": PLATEAU,
}


def train(repo, folder, data_dir, flags):
    """Train in `repo`. Returns the path of the last checkpoint. Some configurations have the knobs of
    examples/ngram.py, which were train.py's in the other version."""
    is_new = repo == REPO and ("extras" in flags or "best" in flags)
    script = "examples/ngram.py" if is_new else "train.py"
    where = [f"--data_dir={data_dir}", f"--out_dir={folder}"]
    known = [flag for flag in COMMON if not flag.startswith("--max_steps") or "max" not in flags]
    words = [sys.executable, script, *known, *where, *flags.split()]
    log = folder.with_suffix(".log")
    process = start(words, log, cwd=repo, env={"PYTHONPATH": str(repo)})
    if process.wait(3600):
        sys.exit(f"{' '.join(words)} failed:\n{log.read_text()[-3000:]}")
    return max(folder.glob("ckpt_*.pt"))


def moments(saved):
    """{number of a weight: its moments}. The older version has a list of one or two optimizers, of
    which Muon is the first; here one has them all, the groups of Muon first."""
    found, optimizers = {}, saved["optimizer"]
    for each in optimizers if isinstance(optimizers, list) else [optimizers]:
        first = len(found)
        found |= {first + number: state for number, state in each["state"].items()}
    return found


def bits_of(path):
    """{part: its bits} of a run whose last checkpoint is at `path`."""
    saved = torch.load(path, weights_only=True)
    state = {name: saved["state"][name] for name in ("step", "sequences", "tokens", "lr_factor")}
    rng = tree_map(lambda part: getattr(part, "tolist", lambda: part)(), saved["rng"])
    parts = {"weights": saved["model"], "moments": moments(saved), "random state": rng}
    parts |= {"state": state, "scale": saved["scaler"].get("scale", 1.0)}
    return {name: digest(part) for name, part in parts.items()} | {"rows": rows(path.parent)}


def differences(then, now):
    """What differs, in words."""
    words = [name for name in now if now[name] != then[name] and name != "rows"]
    if len(now["rows"]) != len(then["rows"]):
        words.append(f"{len(then['rows'])} rows then, {len(now['rows'])} now")
    for old, new in zip(then["rows"], now["rows"], strict=False):
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
                runs.append(bits_of(train(repo, out_dir, data_dir, CONFIGURATIONS[name])))
            found = differences(*runs)
            n_rows = len(runs[1]["rows"])
            print(f"{name:<24}", "; ".join(found) or f"the same bits, {n_rows} rows", flush=True)
            failed = failed or bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
