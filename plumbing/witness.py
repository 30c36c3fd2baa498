"""Was a resume exact? Rows that a process computes again are compared with those that the log of its
run already holds."""

from typing import Any

from plumbing import console
from plumbing.console import print0
from plumbing.hooks import Hook
from plumbing.log import Witness, is_past


class ResumeCheck(Hook):
    """Compares what a resumed run computes with the rows past its checkpoint that its log holds, and
    records the result as an event `resume_checked`.

    changed: {name: [then, now]} of what is known to have changed since the checkpoint."""

    def __init__(self, run: Any, changed: dict):
        self.run = run
        self.folder = run.folder
        self.knobs = run.facts["config"]
        self.begin_at = run.state["step"]
        self.changed = changed
        self.others = []  # {knob: value} for each row that was computed with other knobs
        course = [name for name, knob in run.knobs.items() if not knob.policy]
        old_rows = []
        then = run.resumed_from
        for row in self.folder.log.old_rows():
            then = row.get("knobs", then)  # an event `resume` has the knobs of the rows that follow
            if is_past(row, self.folder.log.kept):
                known = [name for name in course if name in then]
                other = {name: then[name] for name in known if then[name] != self.knobs[name]}
                if other:
                    self.others.append(other)
                else:
                    old_rows.append(row)
        self.has_old_rows = bool(old_rows)
        self.witness = Witness(old_rows, self.knobs["best_metric"])

    def row(self, row: dict, is_kept: bool) -> None:
        self.witness.see(row)
        is_over = row["kind"] != "event" and self.witness.is_over(row["step"])
        if is_over or (row.get("event") == "end" and self.witness.compared):
            self.close(row["step"])

    def close(self, step: int) -> None:
        """Record what was compared, and print it; nothing if the old rows are of other data."""
        self.run.hooks.remove(self)
        if self.has_old_rows and not self.witness.compared:
            return
        names = ("compared", "equal", "steps", "first_difference")
        fields = {"from": self.begin_at} | {name: getattr(self.witness, name) for name in names}
        if self.others and not self.has_old_rows:
            fields |= {"other_course": self.others[-1], "rows": len(self.others)}
        self.folder.record(step, "resume_checked", **fields)
        message = console.resume_words(fields, self.changed)
        if not self.knobs["deterministic"]:
            message += " (deterministic mode is off)"
        print0(message)
