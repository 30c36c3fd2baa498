"""Was a resume exact? Rows that a process computes again are compared with those that the log of its
run already holds."""

from typing import Any

from plumbing import console
from plumbing.console import print0
from plumbing.log import Witness, course, is_past


class RowWatcher:
    """What gets the rows of a run: see RunFolder.watchers. Here it does nothing."""

    def see_earlier(self, rows: list[dict]) -> None:
        """These rows are in the log when the process begins, up to its checkpoint."""

    def see(self, row: dict, is_kept: bool) -> None:
        """A row was logged. is_kept: false for steps that the process that resumes takes again."""

    def before_end(self, step: int) -> None:
        """The run has ended at `step`; the event `end` comes next."""

    def after_end(self, ended: str) -> None:
        """All rows are written, and so is run.json. ended: how the run ended, in words."""


class ResumeCheck(RowWatcher):
    """Compares what a resumed run computes with the rows past its checkpoint that its log holds, and
    records the result as an event `resume_checked`.

    rows: of the whole log. changed: {name: [then, now]} of what is known to have changed since the
    checkpoint."""

    def __init__(self, run: Any, rows: list[dict], changed: dict):
        self.folder = run.folder
        self.knobs = run.facts["config"]
        self.begin = run.state["step"]
        self.changed = changed
        self.others = []  # of each row on another course, the knobs that make it one
        old_rows = []
        now = {name: self.knobs[name] for name, knob in run.knobs.items() if not knob.policy}
        knobs = run.before
        for row, begun, _ in course(rows):
            knobs = begun["knobs"] if begun else knobs
            if is_past(row, self.folder.log.kept):
                then = {name: knobs.get(name, now[name]) for name in now}
                if then == now:
                    old_rows.append(row)
                else:
                    self.others.append(dict(sorted(then.items() - now.items())))
        self.has_old_rows = bool(old_rows)
        self.witness = Witness(old_rows, self.knobs["best_metric"])

    def see(self, row: dict, is_kept: bool) -> None:
        if row["kind"] != "event":
            self.witness.see(row)
            if self.witness.is_over(row["step"]):
                self.close(row["step"])

    def before_end(self, step: int) -> None:
        if self.witness.compared:  # else it stays unmeasured
            self.close(step)

    def close(self, step: int) -> None:
        """Record what was compared, and print it; nothing if the old rows are of other data."""
        self.folder.watchers.remove(self)
        if self.has_old_rows and not self.witness.compared:
            return
        names = ("compared", "equal", "steps", "first_difference")
        fields = {"from": self.begin} | {name: getattr(self.witness, name) for name in names}
        if self.others and not self.has_old_rows:
            fields |= {"other_course": self.others[-1], "rows": len(self.others)}
        self.folder.record(step, "resume_checked", **fields)
        message = console.resume_words(fields, self.changed)
        if not self.knobs["deterministic"]:
            message += " (deterministic mode is off)"
        print0(message)
