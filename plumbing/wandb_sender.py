"""
Send the rows of a run's metrics.jsonl to Weights & Biases:

    python train.py config/shakespeare.py --wandb_log=true    # starts it beside the run
    python plumbing/wandb_sender.py out/shakespeare           # sends the rows not yet sent

It is a separate process, so that wandb cannot disturb the training. It never asks for a key (set
WANDB_API_KEY, or type `wandb login`). WANDB_MODE=offline writes out/NAME/wandb, for `wandb sync`.
A run stays one wandb run however often it resumes. Each row is sent once: rows that a resumed run
computes again are the same, except for times, and wandb keeps the first. Its step counter cannot
decrease, so it is `sequences`, which a rollback does not reset; charts are drawn over `step`.
"""

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

if __name__ == "__main__":  # else Python looks for modules in plumbing/
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from plumbing.cli import fail
from plumbing.files import read_json, write_json

TO_TYPE = "training is not affected; python plumbing/wandb_sender.py {} sends the rest"


@contextlib.contextmanager
def sending(folder, say, patience=30):
    """A context in which a separate process sends the rows of the run in `folder` as they come.

    At the end it waits up to `patience` seconds until all are sent: metrics.jsonl keeps them.
    """
    command = [sys.executable, __file__, str(folder), str(os.getpid())]
    try:  # in a session of its own, which Ctrl-C does not reach
        process = subprocess.Popen(command, start_new_session=True)
    except OSError as error:
        say(f"wandb    failed ({error.strerror}); {TO_TYPE.format(folder)}")
        yield
        return
    try:
        yield
    finally:
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.returncode < 0:
            say(f"wandb    was cut off; {TO_TYPE.format(folder)}")


def main():
    folder = Path(*sys.argv[1:2])
    trainer = int(*sys.argv[2:3])  # process id of train.py, or 0
    if not (folder / "run.json").is_file():
        fail("expected the folder of a run; type: python plumbing/wandb_sender.py out/NAME")
    terminal = os.fdopen(os.dup(1 if trainer else 2), "w")
    try:
        if trainer and hasattr(os, "nice"):  # not on Windows
            os.nice(10)
        (folder / "wandb").mkdir(exist_ok=True)
        log = os.open(folder / "wandb/sender.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        with contextlib.suppress(ImportError):  # Windows
            import fcntl

            fcntl.flock(log, fcntl.LOCK_EX)  # waits until no other process sends this run
        os.dup2(log, 1)  # wandb's own process, which may outlive a killed sender, has the lock too
        os.dup2(log, 2)
        send(folder, trainer, say=lambda line: print(line, file=terminal, flush=True))
    except BaseException as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        if isinstance(error, ImportError):
            reason = "it is not installed; type: pip install wandb"
        print(f"wandb    failed ({reason}); {TO_TYPE.format(folder)}", file=terminal, flush=True)
        os._exit(1)
    os._exit(0)  # wandb's own exit may wait for a network that is not there


def send(folder, trainer, say):
    """Send the rows not sent yet, and new ones while the process `trainer` runs (0: none).

    A killed wandb loses rows. So rows are recorded as sent only once it has finished; what it left
    unfinished is set aside and sent again. A server says what it has (starting_step).
    """
    import wandb

    memory = {"id": secrets.token_hex(4), "sent": -1} | read_json(folder / "wandb.json")
    if unfinished := memory.pop("unfinished", None):
        with contextlib.suppress(OSError):
            (folder / "wandb" / unfinished).rename(folder / "wandb" / f"cut-off-{unfinished}")
    write_json(folder / "wandb.json", memory)  # the id, before wandb gets it
    config = read_json(folder / "run.json").get("config") or {}
    if wandb.setup(wandb.Settings(silent=True)).settings.mode == "online":
        if not wandb.login(prompt=False):
            raise RuntimeError("not logged in; type: wandb login, or set WANDB_MODE=offline")
    settings = {"silent": True, "console": "off", "disable_git": True, "init_timeout": 20}
    run = wandb.init(
        project=config.get("wandb_project"),
        name=config.get("wandb_run_name") or folder.resolve().name,
        id=memory["id"],
        resume="allow",
        dir=str(folder),
        config=config,
        allow_val_change=True,
        settings=wandb.Settings(**settings, finish_timeout=20, finish_timeout_raises=True),
    )
    say(f"wandb    {run.url or run.settings.sync_dir}")
    write_json(folder / "wandb.json", memory | {"unfinished": Path(run.settings.sync_dir).name})
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    memory["sent"] = max(memory["sent"], run.starting_step - 1)
    for sequences, row in read_steps(folder, trainer):
        if sequences > memory["sent"]:
            run.log(row, step=sequences, commit=True)
            memory["sent"] = sequences
    ended = read_json(folder / "run.json").get("ended")
    run.finish(exit_code=int(not ended or ended.startswith("failed")))
    write_json(folder / "wandb.json", memory)


def read_steps(folder, trainer):
    """Yields (sequences, row) for each step, until the run or its process has ended."""
    path = folder / "metrics.jsonl"
    file = open(os.devnull, "rb")
    row = {}  # of one step: the train row, and the eval row after it
    is_running = True
    while is_running:
        ended = read_json(folder / "run.json").get("ended")  # read first: if set, no row follows
        is_running = not ended and os.getppid() == trainer
        if path.exists() and not os.path.samefile(path, file.fileno()):
            file = open(path, "rb")  # a resume or rollback replaced it: start over, without `row`
            row = {}
            sequences = 0
        while (line := file.readline()).endswith(b"\n"):
            new = json.loads(line)
            if new["kind"] == "event":
                continue
            if row and new.get("sequences", sequences) > sequences:
                yield sequences, row
                row = {}
            sequences = new.get("sequences", sequences)
            row |= {name: new[name] for name in new if name != "kind"}
        file.seek(-len(line), os.SEEK_CUR)  # half a line: the rest comes later
        time.sleep(0.5 * is_running)
    if row and (ended or not trainer):  # after a kill, a resume may still add the eval row
        yield sequences, row


if __name__ == "__main__":
    main()
