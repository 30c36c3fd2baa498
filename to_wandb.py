"""Copies the rows of a run's metrics.jsonl to Weights & Biases:

    python train.py config/shakespeare.py --wandb_log=true    # starts it beside the run
    python to_wandb.py out/shakespeare                        # sends what is not there yet

A process of its own that reads the file as it grows: nothing that wandb does, or fails to do, reaches
the training. It never asks for a key (WANDB_API_KEY or `wandb login` give one beforehand), and
WANDB_MODE=offline writes below out/NAME/wandb, for `wandb sync`.

A run is one wandb run however often it is resumed; its id, and how far the rows were sent, are in
out/NAME/wandb.json. A row is sent once. What a resumed run computes a second time comes to the same
bits, but for the clock's numbers; wandb keeps those of the first time. wandb's own counter must never
go back, so it counts batches, as no rollback can turn those back; what is drawn is drawn over `step`.
"""

import contextlib
import fcntl
import json
import os
import secrets
import select
import sys
from pathlib import Path

from configurator import fail


def read_json(path):
    """{} where there is none; as record.py's, which would load torch here for nothing."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def new_rows(path, place):
    """The whole lines of metrics.jsonl that were added since the last call, as rows.

    place: [the open file, or None], which this keeps. A rollback or resume puts another file in its
    place: then from its start, since whoever sends them knows by the row what was sent.
    """
    with contextlib.suppress(OSError):
        if place[0] is None or os.fstat(place[0].fileno()).st_ino != path.stat().st_ino:
            place[0] = open(path, "rb")
    while place[0]:
        start = place[0].tell()
        line = place[0].readline()
        if not line.endswith(b"\n"):
            place[0].seek(start)  # half a line: the rest comes later
            return
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if row["kind"] in ("train", "eval", "event"):
                yield row


def send(folder, follow, wait, tell):
    """Send the rows of the run in `folder` and finish; with follow, not until wait() is false."""
    import wandb

    place = folder / "wandb"
    place.mkdir(exist_ok=True)
    lock = os.open(place, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # the sender of a session that was killed may not be done yet
    memory = {"id": secrets.token_hex(4), "sent": -1} | read_json(folder / "wandb.json")
    config = read_json(folder / "run.json").get("config") or {}
    if wandb.setup(wandb.Settings(silent=True)).settings.mode == "online":
        if not wandb.login(prompt=False):
            raise RuntimeError("not logged in; type: wandb login, or set WANDB_MODE=offline")
    run = wandb.init(
        project=config.get("wandb_project"),
        name=config.get("wandb_run_name") or folder.resolve().name,
        id=memory["id"],
        resume="allow",
        dir=str(folder),
        config=config,
        allow_val_change=True,
        settings=wandb.Settings(
            silent=True, console="off", disable_git=True, init_timeout=20, finish_timeout=20
        ),
    )
    tell(f"wandb    {run.url or run.settings.sync_dir}")
    run.define_metric("step")
    run.define_metric("*", step_metric="step")

    file, row, at, ended = [None], {}, 0, None  # at: batches that the run had learned from at `row`

    def remember():
        temporary = folder / "wandb.json.tmp"
        temporary.write_text(json.dumps(memory))
        os.replace(temporary, folder / "wandb.json")

    def send_row():
        if row and at > memory["sent"]:
            run.log(row, step=at, commit=True)
            memory["sent"] = at
            remember()

    remember()
    going = True
    while going:
        going = wait()  # before the last look, which so comes after the last row
        for new in new_rows(folder / "metrics.jsonl", file):
            if new["kind"] == "event":
                ended = new.get("ended", ended)
                continue
            ended = None
            then = new.get("batch_index", at - 1) + 1
            if then != at:
                send_row()
                row = {}
            at = then
            del new["kind"]
            row |= new  # of train and of eval: one row to wandb
    if ended or not follow:  # where a run was killed, the evaluation of its last row may be to come
        send_row()
    run.finish(exit_code=int(not ended or ended.startswith("failed")))


def main():
    if len(sys.argv) < 2 or not (Path(sys.argv[1]) / "run.json").is_file():
        fail("expected the folder of a run; type: python to_wandb.py out/NAME")
    folder, follow = Path(sys.argv[1]), "--follow" in sys.argv[2:]
    terminal = os.fdopen(os.dup(1 if follow else 2), "w")
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)  # wandb has much to say
    os.dup2(nowhere, 2)

    def tell(line):
        print(" ".join(line.split()), file=terminal, flush=True)

    def wait():
        """Wait a second; False once train.py has closed the pipe: at its end, however it ends."""
        return follow and not select.select([0], [], [], 1.0)[0]

    code = 0
    try:
        if follow:
            os.nice(10)
        send(folder, follow, wait, tell)
    except BaseException as error:
        code, why = 1, f"{type(error).__name__}: {error}"
        if isinstance(error, ImportError):
            why = "it is not installed; type: pip install wandb"
        goes_on = "training goes on without it; later, " if follow else "with that in order, "
        tell(f"wandb    failed ({why[:200]}); {goes_on}python to_wandb.py {folder} sends the rest")
    os._exit(code)  # wandb's own way out may wait for a network that is not there


if __name__ == "__main__":
    main()
