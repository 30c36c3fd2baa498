"""Copies the rows of metrics.jsonl to Weights & Biases. Imported only with --wandb_log=true."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from plumbing.console import print0
from plumbing.witness import RowWatcher

WANDB_SECONDS = 30.0  # longest wait for Weights & Biases at the start, and at the end


class Wandb(RowWatcher):
    """Sends rows to Weights & Biases. Its step can only grow, so it is `sequences`, which a
    rollback does not reset. A killed wandb loses rows, so every session sends all that the server
    lacks."""

    def __init__(self, folder: Path, config: dict, run_id: str):
        self.sequences = 0  # of the latest row that has them: an eval row is of the same step
        self.run = None  # None: without it
        with self.giving_up():
            self.run = start_wandb(folder, config, run_id)

    def see_earlier(self, rows: list[dict]) -> None:
        for row in rows:
            self.see(row, is_kept=True)

    def see(self, row: dict, is_kept: bool) -> None:
        if not self.run or row["kind"] == "event" or not is_kept:
            return
        self.sequences = row.get("sequences", self.sequences)
        if self.sequences < self.run.starting_step:
            return
        values = {key: row[key] for key in row if key != "kind"}
        with self.giving_up():
            self.run.log(values, step=self.sequences)

    def after_end(self, ended: str) -> None:
        if self.run:
            with self.giving_up():
                self.run.finish(exit_code=int(ended.startswith("failed")))

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """A context that prints an error, and goes on without wandb from there."""
        try:
            yield
        except Exception as error:  # whatever it raises must not end a run
            print0(f"wandb    failed ({error!r}); training continues without it")
            self.run = None


def start_wandb(folder: Path, config: dict, run_id: str) -> Any:
    """Begin or resume a run, without asking for a key."""
    import wandb

    for session in folder.glob("wandb/offline-run-*"):  # the new one will hold all rows
        session.rename(session.with_name(f"replaced-{session.name}"))
    settings = wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        login_timeout=WANDB_SECONDS,
        init_timeout=WANDB_SECONDS,
        finish_timeout=WANDB_SECONDS,
        finish_timeout_raises=True,
    )
    if wandb.setup(settings).settings.mode == "online" and not wandb.login(prompt=False):
        raise PermissionError("no key; type: wandb login, or set WANDB_MODE=offline")
    run = wandb.init(
        project=config.get("wandb_project"),
        name=config.get("wandb_run_name") or folder.resolve().name,
        id=run_id,
        resume="allow",
        dir=str(folder),
        config=config,
        allow_val_change=True,
        settings=settings,
    )
    run.define_metric("*", step_metric="step")
    print0(f"wandb    {run.url or run.settings.sync_dir}")
    return run
