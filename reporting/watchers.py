"""Hooks of a run: a report at its end, and Weights & Biases."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from plumbing.console import REPO, print0
from plumbing.hooks import Hook
from plumbing.log import read_rows, standing, undone
from plumbing.ranks import rank

WANDB_SECONDS = 30.0  # longest wait for Weights & Biases at the start, and at the end


class ReportAtEnd(Hook):
    """Prints what report.py prints, run for at most a minute; one line if it fails."""

    def end(self, run: Any, ended: str) -> None:
        if rank() > 0 or ended.startswith(("stopped by", "left")):  # a signal leaves no time
            return
        command = [sys.executable, str(REPO / "report.py"), str(run.folder.path)]
        try:
            text = subprocess.check_output(command, stderr=subprocess.PIPE, text=True, timeout=60)
            print0(text.rstrip())
        except (OSError, subprocess.SubprocessError) as error:
            print0(f"report   failed ({error})")


class Wandb(Hook):
    """Sends rows to Weights & Biases, first those of earlier processes up to the step of `run`, whose
    folder is open. Its step can only grow, and is `sequences`. A killed wandb loses rows, so every
    session sends all that the server lacks."""

    def __init__(self, run: Any):
        self.sequences = 0  # of the latest row that has them: an eval row is of the same step
        self.session = None  # None: without it
        with self.giving_up():
            self.session = start_wandb(run.folder.path, run.folder.facts)
        for row in undone(standing(read_rows(run.folder.log.path)), run.state["step"]):
            self.row(row, is_kept=True)

    def row(self, row: dict, is_kept: bool) -> None:
        if not self.session or not is_kept:
            return
        self.sequences = row.get("sequences", self.sequences)
        if self.sequences >= self.session.starting_step:
            with self.giving_up():
                self.session.log(named(row), step=self.sequences)

    def end(self, run: Any, ended: str) -> None:
        if self.session:
            with self.giving_up():
                self.session.finish(exit_code=int(ended.startswith("failed")))

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """A context that prints an error, and goes on without wandb from there."""
        try:
            yield
        except Exception as error:  # whatever it raises must not end a run
            print0(f"wandb    failed ({error!r}); training continues without it")
            self.session = None


def named(row: dict) -> dict:
    """What is sent of a row: `train/loss`, `val/loss`; of an event its text, `events/skipped`."""
    if row["kind"] == "event":
        return {f"events/{row['event']}": json.dumps(row)}
    kind = row["kind"].replace("eval", "val")
    names = row.keys() - {"kind", "step"}
    values = {f"{kind}/{name.removeprefix('val_')}": row[name] for name in names}
    return values | {"step": row["step"]}


def start_wandb(folder: Path, facts: dict) -> Any:
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
    config = facts["config"] | facts["run"]  # knobs, commit, device
    config |= {"parameters": facts["parameters"], "versions": facts["versions"]}
    run = wandb.init(
        project=config.get("wandb_project"),
        name=config.get("wandb_run_name") or folder.resolve().name,
        id=facts["wandb_id"],
        resume="allow",
        dir=str(folder),
        config=config,
        allow_val_change=True,
        settings=settings,
    )
    run.define_metric("*", step_metric="step")
    run.define_metric("val/loss", step_metric="step", summary="min")
    print0(f"wandb    {run.url or run.settings.sync_dir}")
    return run
