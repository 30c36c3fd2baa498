"""What happened at step N of a run, can its log be computed again, and where did two runs part?

    python replay.py out/shakespeare --step=812          # its numbers, weights and text
    python replay.py out/shakespeare --verify=true       # all of it, up to the first difference
    python replay.py out/shakespeare out/again           # where two logs part
    python replay.py out/mine mine.py --step=9  # a fork: what a run names is not executed

It computes with the functions of train.py and the knobs that the run had at each step, and writes
nothing, so the run may be going on. A flag of train.py wins over the run's own value: where it was
another machine's, --data_dir=FOLDER or --device=cpu. For a run of several ranks write
torchrun --standalone --nproc_per_node=2 replay.py in place of python replay.py.

Exit code: 0 all is equal, 1 something differs, 2 bad input; 125 two logs are equal as far as the
shorter goes, which `git bisect run` takes as "cannot tell"."""

import plumbing  # first: it sets what torch reads when it is imported

# isort: split
import contextlib
import itertools
import math
import os
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

import train
from plumbing import fail, print0
from prepare_data import tokenizer_of

step = 0  # to show
verify = False  # compute the whole log again

SHOWN = 8  # sequences of a step
KINDS = "train", "eval", "event"  # of rows; those of a fork are not looked at


def main(argv: list[str] | None = None) -> int:
    script, words = plumbing.script_among(argv)
    loop = plumbing.load_script(script, train)
    folders = []
    with plumbing.configured(vars(loop), globals(), argv=words, words=folders) as config:
        if len(folders) == 2:
            return where_they_part(*folders)
        if len(folders) != 1 or verify == (step > 0):
            fail("expected RUN --step=N, RUN --verify=true, or RUN OTHER")
        log = Log(folders[0])
        plumbing.require_script(log.path, log.facts)
        if step > log.last:
            fail(f"--step={step}: {log.path} has the steps 1 to {log.last}")
        torch.set_num_threads(log.facts["run"]["threads"])
        changed = replay(log, loop, {name: config[name] for name in config.typed})
        print0(f"{log.path}: {log.problem or 'all numbers are those of the log'}")
        print0(f"changed in its course or since: {changed}")
        return int(log.problem != "")


def where_they_part(*folders):
    """Print the first difference of two logs. Returns the exit code."""
    one, other = map(Log, folders)
    files = {path.name: path for path in other.path.glob("code/*.py")}
    print0(f"changed: {one.changes(other.facts, files, other.events)}")
    for row in other.rows.values():
        if difference := one.difference(row, row["kind"] == "train" and row["step"] < one.last):
            print0(f"the logs part at {difference}")
            return 1
    print0(f"equal up to step {min(one.last, other.last)}; they end at {one.last}, {other.last}")
    return 0 if one.last == other.last else 125  # one is shorter


class Log:
    """What the folder of a run says. Raises BadInput if it holds no run.

    facts: run.json; events: the rows in their order; rows: {(kind or event, step): row}; last: their
    last step; problem: the first difference, in words."""

    problem = ""

    def __init__(self, folder):
        self.path = Path(folder)
        self.facts = plumbing.read_json(self.path / "run.json")
        self.events = [
            row for row in plumbing.read_rows(self.path / "metrics.jsonl") if row["kind"] in KINDS
        ]
        if "identity" not in self.facts or not self.events:
            fail(f"{folder} holds no run; expected the out_dir of train.py, such as out/run")
        self.rows = {plumbing.key_of(row): row for row in self.events}
        self.last = max(at for _, at in self.rows)

    def changes(self, facts, files, events=()):
        """In words: what differs from this run by the facts and files of another, and what a resume
        of this run, or one in `events`, has changed."""
        changed, _ = plumbing.changes(self.facts, facts, files, self.path / "code")
        for row in (*self.events, *events):
            changed |= row.get("changed", {})
        return plumbing.change_words(changed) or "nothing that is known"

    def difference(self, row, is_needed):
        """In words: the first number in which `row` differs from the log, or "". is_needed: whether
        the log must have such a row."""
        key = plumbing.key_of(row)
        if key not in self.rows:
            return f"step {row['step']}: no such row" if is_needed else ""
        found = plumbing.first_difference(self.rows[key], row)
        return "step {step}: {field} {then} -> {now}".format(**found) if found else ""

    def course(self, state):
        """Yields (knobs, row) of each step and evaluation after `state`, until there is a problem.
        run.json has the last knobs, and each resume says what it has changed."""
        knobs, course = self.facts["config"], []
        for row in reversed(self.events):
            if row["kind"] != "event":
                course.append((knobs, row))
            knobs = knobs | {name: pair[0] for name, pair in row.get("changed", {}).items()}
        for knobs, row in reversed(course):
            is_past = plumbing.is_past(row, state["step"], state["evaluated"])
            if is_past and not (self.problem if verify else row["step"] > step):
                yield knobs, row

    def see(self, run, row):
        """One of train.on_row: compare a row that is computed again."""
        key = plumbing.key_of(row)
        self.problem = self.problem or self.difference(row, row["kind"] in KINDS)
        for name in ("lr", "loss", "grad_norm", "skipped") if key == ("train", step) else ():
            print0(f"{name:>12} {self.rows[key][name]} in the log, {row[name]} computed")


# ---- computing it again --------------------------------------------------------------------------


def replay(log, loop, typed):
    """Compute a run again by the functions of `loop`, train or a script: from its beginning or, to
    show a step, from the newest checkpoint before it. typed: knobs that have another value now.
    Returns what has changed, in words."""
    fixed = {
        "out_dir": log.path,
        "resume": "restart",
        "device": log.facts["config"]["device"],
        **typed,
    }
    saved = None
    before = [path for path in plumbing.checkpoints(log.path) if plumbing.step_of(path) < step]
    if before:
        plumbing.verify(before[0])
        saved = plumbing.read_checkpoint(before[0])
    course = log.course(saved["state"] if saved else train.FRESH_STATE)
    device = plumbing.choose_device(fixed["device"], loop.deterministic)
    with (
        plumbing.joined(device),  # ranks can join only once
        plumbing.setting(vars(loop), {"on_row": [*loop.on_row, log.see]}),
    ):
        for knobs, part in itertools.groupby(course, lambda pair: pair[0]):
            with loop.build(flags_of(log, knobs | fixed, saved)) as run:
                if saved:
                    put_back(loop, run, saved)
                vars(loop).update(num_workers=0, log_interval=0)
                run.batches = loop.load_batches(run)
                run.peak = math.nan  # not measured
                if run.facts["data"]["fingerprint"] != log.facts["data"]["fingerprint"]:
                    fail(f"{log.path}: its data is not in {loop.data_dir}; type --data_dir=FOLDER")
                for _, row in part:
                    compute(loop, run, row)
                    log.problem = plumbing.from_all_ranks(log.problem)[0]  # rank 0 has seen the row
                saved = plumbing.from_all_ranks(loop.checkpoint_of(run))[0]
    return log.changes(run.facts, run.files)


def flags_of(log, knobs, saved):
    """The flags for train.build() of a run that begins anew, or goes on with the checkpoint `saved`."""
    if saved and not os.path.exists(knobs["init_from"]):
        knobs["init_from"] = ""
    return [f"--{name}={plumbing.show(knobs[name])}" for name in log.facts["config"]]


def put_back(loop, run, saved):
    """As train.py resumes."""
    loop.restore(run, saved)
    if saved["identity"]["knobs"] != run.facts["identity"]["knobs"]:  # by --resume=force
        run.state |= {name: loop.FRESH_STATE[name] for name in loop.BEST}


def compute(loop, run, row):
    """Compute a row of the log again: a step, or an evaluation."""
    if row["kind"] == "eval":
        if verify or loop.plateau_factor < 1:
            loop.record_evaluation(run)
        return
    is_shown = row["step"] == step
    before = [weight.detach().clone() for weight in run.model.parameters()] if is_shown else []
    with contextlib.suppress(plumbing.RunFailed):  # the last of ten that are not finite
        loop.take_step(run)
        loop.log_steps(run)
    if is_shown:
        show_step(loop, run, before)


def show_step(loop, run, before):
    """Print the text of the step that was just taken, and the norms of the gradients (clipped), the
    weights and the updates. before: the weights before it."""
    meta = run.facts["data"]["meta"]
    if "tokenizer" in meta:
        count = loop.sequences_at(step - 1)
        inputs, _ = loop.batch_at(run, run.state["sequences"] - count, min(count, SHOWN))
        for ids in tree_leaves(inputs)[0].tolist():
            print0(repr(tokenizer_of(meta).decode(ids)))
    print0("    gradient      weight      update")
    for (name, weight), old in zip(run.model.named_parameters(), before, strict=True):
        if weight.grad is not None:
            tensors = weight.grad, weight, weight - old
            norms = [plumbing.full_tensor(tensor.norm()) for tensor in tensors]
            print0("{:12.4g}{:12.4g}{:12.4g}".format(*norms), name)


if __name__ == "__main__":
    plumbing.exit_process(main())
