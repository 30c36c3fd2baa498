"""Runs in processes of their own: a configuration is trained in a folder, and its numbers are read
from there."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import torch

from plumbing.cli import BadInput, RunFailed, knobs_of_tools
from plumbing.console import REPO
from plumbing.data import end_with_parent
from plumbing.files import digest_of, read_json
from plumbing.log import read_rows
from plumbing.run_folder import free_name


def race(script, words, seed):
    """{seconds of the process, last validation loss, dataset} of a whole run, from its folder."""
    folder = trained(str(REPO / script), words, seed)
    facts = read_json(folder / "run.json")
    last = {row["kind"]: row for row in read_rows(folder / "metrics.jsonl")}
    return {
        "process": sum(facts["seconds"].values()),
        "loss": last["eval"]["val_loss"],
        "dataset": facts["data"]["name"],
    }


def trained(script, words, seed):
    """The folder of a whole run. It is not trained again if it is finished, and neither these words
    nor any file that it loaded have changed."""
    own = ("--out_dir=", "--seed=")
    words = [word for word in for_train(words) if not word.startswith(own)]
    texts = [digest_of(word) for word in (script, *words) if word.endswith(".py")]
    facts = json.dumps([script, words, texts, torch.__version__])
    first = Path("out", "seeds", sha256(facts.encode()).hexdigest()[:8], f"seed_{seed}")
    folders = [first, *first.parent.glob(f"{first.name}_*"), free_name(first, "_", 2)]
    folder = next(each for each in folders if not has_other_code(each))
    if read_json(folder / "run.json").get("ended") != "finished":
        execute(script, ["--report=false", *words], out_dir=folder, seed=seed)
    return folder


def has_other_code(folder):
    """Whether the run in `folder`, if there is one, had loaded a file that has changed since."""
    code = read_json(folder / "run.json").get("run", {"code": {}})["code"]
    with suppress(FileNotFoundError):
        return any(not digest_of(REPO / name).startswith(code[name]) for name in code)
    return True


def execute(script, words, **knobs):
    """Run `script` with `words`, flags and config files, and `knobs`. Raises RunFailed."""
    knobs = {"audit_interval": -1} | knobs
    output_of([script, *for_train(words), *(f"--{name}={knobs[name]}" for name in knobs)])


def for_train(words):
    """`words` without the flags of bench.py and check.py."""
    own = knobs_of_tools()
    return [word for word in words if word.partition("=")[0].removeprefix("--") not in own]


def output_of(command, cwd=None):
    """What Python prints when it runs `command`."""
    return "".join(line for _, line in watched(command, cwd)[0])


def watched(command, cwd=None):
    """([(seconds since the start, line), ...], the peak of memory in KiB): what Python prints when it
    runs `command` in a session of its own: Ctrl-C reaches only this process, which ends the other.
    On Linux it ends with this process, however that ends. Raises RunFailed, or BadInput where the
    process has named that in a line of its own."""
    began = time.perf_counter()
    command = [sys.executable, "-u", *map(str, command)]
    process = subprocess.Popen(
        command,
        cwd=cwd,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=end_with_parent,
    )
    try:
        lines = [(time.perf_counter() - began, line) for line in process.stdout]
        _, status, usage = os.wait4(process.pid, 0)
    finally:
        process.kill()
    if status:
        printed = "".join(line for _, line in lines)
        kind = BadInput if os.waitstatus_to_exitcode(status) == 2 else RunFailed
        raise kind(f"{' '.join(command)[-400:]} ended with\n{printed[-2000:]}")
    return [*lines, (time.perf_counter() - began, "")], usage.ru_maxrss
