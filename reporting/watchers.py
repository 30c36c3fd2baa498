"""What gets the rows of a run while it is trained: Weights & Biases, and a report at its end."""

import subprocess
import sys
from typing import Any

from plumbing.console import REPO, print0
from plumbing.witness import RowWatcher


class ReportAtEnd(RowWatcher):
    """Prints what report.py prints, run for at most a minute; one line if it fails."""

    def __init__(self, folder):
        self.folder = folder

    def after_end(self, ended: str) -> None:
        if ended.startswith(("stopped by", "left")):  # a signal leaves no time
            return
        command = [sys.executable, str(REPO / "report.py"), str(self.folder)]
        run = dict(stderr=subprocess.PIPE, text=True, timeout=60)
        try:
            print0(subprocess.check_output(command, **run).rstrip())
        except (OSError, subprocess.SubprocessError) as error:
            print0(f"report   failed ({error})")


def copy_to_wandb(run: Any) -> None:
    """Subscribe Weights & Biases to the rows of a run whose folder is open. Rank 0 only."""
    from reporting.wandb_log import Wandb

    folder = run.folder
    folder.watchers.append(Wandb(folder.path, folder.facts | folder.new_facts))
