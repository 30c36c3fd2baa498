"""The log of a run, read back so that it can be compared bit for bit and computed again. Nothing is
written or locked, and nothing that a run's folder names is executed."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from plumbing import checkpoint as checkpoints
from plumbing.cli import fail, show
from plumbing.files import read_json
from plumbing.witness import Witness, key_of
from reporting.record import read_metrics

KINDS = ("train", "eval", "saved")  # that are compared, in the order in which a step writes them
NOT_FOLLOWED = ("out_dir", "resume")  # a replay has its own

FREE_FLAGS = (  # no bit of a step depends on these
    "--report=false --wandb_log=false --audit_interval=-1 --num_workers=0 --log_interval=1 "
    "--sample_interval=0 --milestone_interval=0"
).split()


# ---- two logs ------------------------------------------------------------------------------------


def differences(then: str | Path, now: str | Path, kinds: tuple = KINDS) -> "Comparison":
    """Compare the logs of two run folders, row by row in the order of the steps: every bit of each
    number that both rows have, but for times, memory and throughput.

    kinds: of the rows to compare: "train", "eval", and "saved" for the hash of each save. Saves
    count where both runs have one, as a signal may have asked for it. A train or eval row that only
    one of the two has is a difference.
    Returns a Witness: `first_difference` is None if the two are equal, else {"step", "field",
    "then", "now"}, which in_words() puts in words; `compared` and `equal` are numbers of rows.
    """
    first, second = Logged(then), Logged(now)
    return compare(first, second, max(first.last, second.last), kinds)


def compare(then: "Logged", now: "Logged", last: int, kinds: tuple = KINDS) -> "Comparison":
    """As differences(), of the steps up to `last`."""
    comparison = Comparison(then.rows_between(-1, last, kinds))
    for row in now.rows_between(-1, last, kinds):
        comparison.see(row)
    comparison.close()
    return comparison


class Comparison(Witness):
    """A Witness for logs that must agree as a whole: a row with another index of the data, and one
    that only one of the two logs has, differ too."""

    def see(self, row: dict) -> None:
        step, kind = key_of(row)
        then = self.old_rows.get((step, kind))
        if then is None:
            if kind != "saved":
                self.note(step, kind, None, "a row")
        elif then.get("sequences") != row.get("sequences"):
            self.note(step, "sequences", then.get("sequences"), row.get("sequences"))
        super().see(row)

    def close(self) -> None:
        """After the last row: those that have not been seen."""
        for step, kind in sorted(self.old_rows):
            if kind != "saved":
                self.note(step, kind, "a row", None)

    def note(self, step: int, name: str, then: Any, now: Any) -> None:
        """Keep this as the first difference, unless one has the same or an earlier step."""
        earlier = self.first_difference
        if earlier is None or step < earlier["step"]:
            self.first_difference = {"step": step, "field": name, "then": then, "now": now}


def in_words(difference: dict) -> str:
    """A first_difference: "step 7: loss 1.234567 then, 1.234568 now"."""
    step, name = difference["step"], difference["field"]
    then, now = difference["then"], difference["now"]
    if name in KINDS:
        there, here = ("no", "one") if then is None else ("a", "none")
        return f"step {step}: {there} {name} row then, {here} now"
    return f"step {step}: {name} {str(then)[:20]} then, {str(now)[:20]} now"


# ---- one log -------------------------------------------------------------------------------------


class Position(NamedTuple):
    """A place in the course of a run: the step that has just ended, and how often the run has
    rolled back before. Positions are in the order in which a run comes to them."""

    rollbacks: int
    step: int


@dataclass
class Stretch:
    """A part of a run that was computed with the same settings."""

    settings: dict  # every knob as resolved, and `threads` and `ranks`
    end: Position


class Checkpoint(NamedTuple):
    path: Path
    content: dict
    sha256: str  # as in a `saved` event

    @property
    def position(self) -> Position:
        state = self.content["state"]
        return Position(state["rollbacks"], state["step"])


class Logged:
    """A run's folder: run.json, metrics.jsonl and checkpoints.

    facts: run.json. rows: {(step, kind): row} of the rows that stand, of KINDS. first, last: the
    step before the first one, and the last one. Raises BadInput if the folder holds no run.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.facts = read_json(self.path / "run.json")
        self.rows = {}
        self.twice = []  # (step, kind) of train and eval rows that the log holds more than once
        self.saves = []  # events `saved` that stand: two of a step, around a rollback, have two hashes
        self.hashes = set()  # of all saves, also of those that a rollback has undone
        self.rollbacks = []  # the step to which each went back, and the one that it came after
        self.resumes = []  # (Position, event), of those after which the run went on
        file = self.path / "metrics.jsonl"
        for row in read_metrics(file)[0] if file.is_file() else ():
            self.add(row)
        if not self.facts or not self.rows:
            fail(f"{self.path} holds no run; expected the out_dir of train.py, such as out/run")
        steps = [step for step, kind in self.rows if kind != "eval"]
        self.first = min(steps, default=0) if self.began_from else 0
        self.last = max(steps, default=0)

    def add(self, row: dict) -> None:
        """Take a row into account, in the order of the file."""
        step, kind = key_of(row)
        if kind == "resume":
            self.undo_course(step)
            self.resumes.append((Position(len(self.rollbacks), step), row))
        if kind in ("resume", "rollback"):  # the steps after it were undone
            self.rows = {key: old for key, old in self.rows.items() if key[0] <= step}
            self.saves = [save for save in self.saves if save["step"] <= step]
        if kind == "rollback":
            self.rollbacks.append((step, row.get("at_step", step)))
        if kind == "saved":
            self.saves.append(row)
            self.hashes.add(row.get("sha256"))
        elif (step, kind) in self.rows:
            self.twice.append((step, kind))
        if kind in KINDS:
            self.rows.setdefault((step, kind), row)

    def undo_course(self, step: int) -> None:
        """Forget the resumes and rollbacks that came after the checkpoint of `step`."""
        while self.rollbacks and self.rollbacks[-1][0] > step:
            self.rollbacks.pop()
        here = Position(len(self.rollbacks), step)
        self.resumes = [old for old in self.resumes if old[0] < here]

    @property
    def began_from(self) -> str | None:
        """The checkpoint of another run with which this one began."""
        return self.fact("run", "began_from")

    def fact(self, part: str, name: str, default: Any = None) -> Any:
        """Of a part of run.json."""
        values = self.facts.get(part)
        return values.get(name, default) if isinstance(values, dict) else default

    def row(self, step: int, kind: str) -> dict:
        """The row of that step, or an empty one."""
        return self.rows.get((step, kind), {})

    def rows_between(self, first: int, last: int, kinds: tuple = KINDS) -> list[dict]:
        """Rows of the steps first + 1 to last, in the order in which a run writes them."""
        keys = [key for key in self.rows if first < key[0] <= last and key[1] in kinds]
        keys.sort(key=lambda key: (key[0], KINDS.index(key[1])))
        return [self.rows[key] for key in keys]

    # ---- its course ------------------------------------------------------------------------------

    def position(self, step: int) -> Position:
        """Where the run took this step for the last time."""
        numbers = [n for n, (back_to, _) in enumerate(self.rollbacks, 1) if back_to < step]
        return Position(max(numbers, default=0), step)

    def check_form(self) -> None:
        """Raises BadInput unless run.json and the events have what is needed to compute it again."""
        try:
            Path(self.facts["command"][0])
            self.stretches(Position(0, -1), self.position(self.last))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            found = f"{self.path} is not of the form that this version writes ({error!r})"
            fail(f"{found}; expected a run of this train.py")

    @cached_property
    def processes(self) -> list[tuple[Position, dict, dict]]:
        """(where it began, its settings, what else had changed) of each process whose steps stand.
        From the last one, which run.json describes, back: each resume says what was changed."""
        run, config = self.facts["run"], self.facts["config"]
        settings = {name: run[name] for name in config} | {"device": config["device"]}
        settings |= {"threads": run["threads"], "ranks": run["world_size"]}
        found = []
        for position, event in reversed(self.resumes):
            settings = settings | event["knobs"]
            known = {name: then for name, (then, _) in event["changed"].items()}
            device = known.pop("device", None)  # its model, and not the knob
            others = [*known.keys() - settings.keys()] + ["device"] * bool(device)
            found.append((position, settings, others))
            settings = settings | {name: known[name] for name in known.keys() & settings.keys()}
        if not self.began_from:  # else its first process has logged a resume, too
            found.append((Position(0, -1), settings, {}))
        return found[::-1]

    def stretches(self, begin: Position, end: Position) -> list[Stretch]:
        """The course of the run from `begin` to `end`, in parts with the same settings."""
        found = []
        ends = [position for position, _, _ in self.processes[1:]]
        for (_, settings, _), stop in zip(self.processes, [*ends, end], strict=True):
            if stop <= begin or (found and found[-1].end == end):
                continue
            followed = {name: settings[name] for name in settings if name not in NOT_FOLLOWED}
            if found and found[-1].settings == followed:
                found[-1].end = min(stop, end)
            else:
                found.append(Stretch(followed, min(stop, end)))
        return found

    def changes(self, begin: Position, end: Position) -> list[str]:
        """In words, what else had changed at each resume on the way from `begin` to `end`."""
        return [
            f"changed when it resumed at step {position.step}: {', '.join(changed)}"
            for position, _, changed in self.processes
            if changed and begin <= position < end
        ]

    # ---- its checkpoints -------------------------------------------------------------------------

    @cached_property
    def files(self) -> dict[Path, Checkpoint | str]:
        """Each checkpoint in the folder, or why it cannot be read."""
        found = {}
        for path in checkpoints.newest_first(self.path):
            try:
                content = checkpoints.load(path)
                found[path] = Checkpoint(path, content, checkpoints.digest_of_state(content))
            except checkpoints.Damaged as error:
                found[path] = f"is damaged ({error})"
            except FileNotFoundError:  # just deleted, by a run that goes on
                continue
            except OSError as error:
                found[path] = f"cannot be read ({error.strerror})"
        return found

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Those that can be read, oldest first."""
        readable = [file for file in self.files.values() if isinstance(file, Checkpoint)]
        return sorted(readable, key=lambda checkpoint: checkpoint.position)

    def start_before(self, end: Position, latest: int) -> Checkpoint | None:
        """The newest checkpoint before `end`, up to step `latest`, with a hash that the log has.
        None: begin as the run did."""
        logged = {(save["step"], save.get("sha256")) for save in self.saves}
        for start in reversed(self.checkpoints):
            step = start.position.step
            is_own = step > self.first or self.began_from
            is_early = step <= latest and start.position < end
            if is_early and is_own and (step, start.sha256) in logged:
                return start
        return None

    def faults(self) -> list[str]:
        """In words: checkpoints that are damaged or not those that the log has, and rows that are
        there twice. Not found: a file that is missing."""
        found = [f"{path} {file}" for path, file in self.files.items() if isinstance(file, str)]
        for checkpoint in self.checkpoints:
            if checkpoint.sha256 not in self.hashes:
                found.append(f"{checkpoint.path}: its hash is not in the log")
        metrics = self.path / "metrics.jsonl"
        found += [f"{metrics} has two {kind} rows of step {step}" for step, kind in self.twice]
        return found


def flags_of(settings: dict, out_dir: Path, data_dir: str) -> list[str]:
    """Flags for train.py with the knobs of a Stretch. data_dir: "" = as it was."""
    knobs = {name: settings[name] for name in settings if name not in ("threads", "ranks")}
    knobs |= {"out_dir": out_dir, "data_dir": data_dir or knobs["data_dir"]}
    return [f"--{name}={show(value)}" for name, value in knobs.items()] + FREE_FLAGS
