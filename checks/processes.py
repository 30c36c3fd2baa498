"""Runs in processes of their own, for check.py and bench.py: a configuration is trained in a folder,
and its numbers are read from there."""

import json
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from statistics import mean, median, stdev

import torch

from plumbing.cli import RunFailed, knobs_of_tools
from plumbing.console import REPO
from plumbing.data import end_with_parent
from plumbing.files import read_json
from plumbing.log import read_rows


def race(script, words, seed):
    """{seconds of the process, last validation loss, dataset, tokens} of a whole run, from its
    folder."""
    folder = trained(str(REPO / script), words, seed)
    facts = read_json(folder / "run.json")
    last = {row["kind"]: row for row in read_rows(folder / "metrics.jsonl")}
    return {
        "process": sum(facts["seconds"].values()),
        "loss": last["eval"]["val_loss"],
        "dataset": facts["data"]["name"],
        "tokens": last["train"]["tokens"],
    }


def summary(results):
    """The row of a table for what race() returned of one command with several seeds."""
    losses = [run["loss"] for run in results]
    return {
        "process": median(run["process"] for run in results),
        "loss": mean(losses),
        "deviation": stdev(losses),
        "tokens": results[0]["tokens"],
    }


def trained(script, words, seed):
    """The folder of a whole run, which is not trained again if it is finished, and neither these
    words nor the code have changed."""
    own = ("--out_dir=", "--seed=")
    words = [word for word in for_train(words) if not word.startswith(own)]
    folder = folder_by_hash(seed, words, script, hashes_of_code(script, *words))
    if read_json(folder / "run.json").get("ended") != "finished":
        execute(script, ["--report=false", *words], out_dir=folder, seed=seed)
    return folder


def folder_by_hash(seed, *facts):
    """Where a run lies that depends on nothing but its seed and these facts."""
    digest = sha256(json.dumps([*facts, torch.__version__], sort_keys=True).encode()).hexdigest()
    return Path("out", "seeds", digest[:8], f"seed_{seed}")


def hashes_of_code(*files):
    """Of the .py files of this repository, and of those among `files`."""
    given = [Path(file) for file in files if file.endswith(".py")]
    paths = {*REPO.glob("*.py"), *REPO.glob("*/*.py"), *given}
    return [sha256(path.read_bytes()).hexdigest() for path in sorted(paths)]


def execute(script, words, **knobs):
    """Run `script` with `words`, flags and config files, and `knobs`. Raises RunFailed."""
    knobs = {"audit_interval": -1} | knobs
    output_of([script, *for_train(words), *(f"--{name}={knobs[name]}" for name in knobs)])


def for_train(words):
    """`words` without the flags of bench.py and check.py."""
    own = knobs_of_tools()
    return [word for word in words if word.partition("=")[0].removeprefix("--") not in own]


def output_of(command, cwd=None):
    """What Python prints when it runs `command`, in a session of its own: Ctrl-C reaches only this
    process, which ends the other. On Linux it ends with this process, however that ends. Raises
    RunFailed."""
    command = [sys.executable, *command]
    done = subprocess.run(
        command,
        cwd=cwd,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=end_with_parent,
        check=False,
    )
    if done.returncode:
        raise RunFailed(f"{' '.join(command)[-400:]} ended with\n{done.stdout[-2000:]}")
    return done.stdout
