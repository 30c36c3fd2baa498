"""What gets the rows of a run while it is trained: Weights & Biases, and a report at its end."""

import subprocess
import sys
from pathlib import Path
from typing import Any

from plumbing.console import REPO, print0
from plumbing.watch import Watch


class ReportAtEnd(Watch):
    """Prints what report.py prints, run for at most a minute; one line if it fails."""

    def after_end(self, folder: Path, ended: str) -> None:
        if ended.startswith(("stopped by", "left")):  # a signal leaves no time
            return
        command = [sys.executable, str(REPO / "report.py"), str(folder)]
        run = dict(stderr=subprocess.PIPE, text=True, timeout=60)
        try:
            print0(subprocess.check_output(command, **run).rstrip())
        except (OSError, subprocess.SubprocessError) as error:
            print0(f"report   failed ({error})")


def copy_to_wandb(run: Any) -> None:
    """Subscribe Weights & Biases to the rows of a run whose folder is open. Rank 0 only."""
    from reporting.wandb_log import Wandb

    run.folder.watchers.append(Wandb(run))
