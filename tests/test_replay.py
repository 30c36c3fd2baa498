"""Replay: any step again, where two runs part, whether a log can be computed again."""

import dataclasses
import json
import shutil

import pytest
import torch
from conftest import events, first, flip_a_bit, make_dataset, run_python, tree
from helpers import torchrun
from sources import around, stop_at

SAVES = ("--save_interval=4", "--eval_interval=6", "--keep_last=9", "--milestone_interval=6")
PART = ("--save_interval=4", "--keep_last=9")
# In the helper's child, replay.py runs in place of train.py
REPLAY = """
import replay
def main(argv=None, hooks=(), own=train.main):
    return replay.main({argv!r}) if argv is None else own(argv, hooks)
train.main = main
"""
FORK = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("fork", {path!r})
sys.modules["fork"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["fork"])
sys.argv[0] = {path!r}
"""


@pytest.fixture
def replay(run_train):
    """replay(*arguments, before, code) -> Done: replay.py with these arguments, as if typed."""

    def run(*arguments, before="", code=0):
        script = before + REPLAY.format(argv=[str(each) for each in arguments])
        return run_train("unused", before=script, code=code)

    return run


@pytest.fixture
def run_fork(run_train, tmp_path):
    """run_fork(name, *flags, source) -> Done: a run started by a script with this source."""

    def run(name, *flags, source="", code=0):
        path = tmp_path / f"{name}_fork.py"
        path.write_text("import torch\nimport train\n" + source)
        return run_train(name, *flags, before=FORK.format(path=str(path)), code=code)

    return run


@pytest.fixture
def good(once, tmp_path):
    """A copy of a good run, to be edited."""
    done = once(*SAVES)
    shutil.copytree(done.out_dir, tmp_path / "run")
    return dataclasses.replace(done, out_dir=tmp_path / "run")


def edit(done, change):
    """Replace each row of metrics.jsonl by change(row), or drop it where that is None."""
    rows = [change(row) for row in done.rows()]
    lines = [json.dumps(row) + "\n" for row in rows if row is not None]
    (done.out_dir / "metrics.jsonl").write_text("".join(lines))


def edited(step, kind="train", **fields):
    def change(row):
        is_asked = kind in (row["kind"], row.get("event")) and row["step"] == step
        return row | fields if is_asked else row

    return change


def edit_facts(done, change):
    path = done.out_dir / "run.json"
    facts = json.loads(path.read_text())
    change(facts)
    path.write_text(json.dumps(facts))


# ---- one step ------------------------------------------------------------------------------------


def test_a_step_comes_out_again_and_nothing_else_changes(good, replay):
    before = tree(good.out_dir)
    again = replay(good.out_dir, "--step=7")
    assert "ckpt_00000006.pt to step 7" in again.stdout
    assert "steps 7 to 7: all logged numbers are computed again, bit for bit" in again.stdout
    new = tree(good.out_dir)
    assert new.keys() - before.keys() == {"replay_00000007.md"}
    assert {name: new[name] for name in before} == before
    page = (good.out_dir / "replay_00000007.md").read_text()
    row = good.rows("train")[6]
    assert str(row["loss"]) in page and str(row["grad_norm"]) in page
    for name in ("Sequence 48", "blocks.0.attention.qkv.weight", "all tensors are"):
        assert name in page, name
    edit(good, edited(7, loss=1.0))
    assert "step 7: loss 1.0 then" in replay(good.out_dir, "--step=7", code=1).stdout


def test_a_run_may_be_asked_while_it_goes_on_at_its_first_step_too(run_train, replay):
    flags = ("--dropout=0.1", "--ema_decay=0.9", "--optimizer=muon", "--accum_steps=2")
    done = run_train("run", *SAVES, *flags, before=stop_at(10), code=143)
    rows = done.out_dir / "metrics.jsonl"
    rows.write_text(rows.read_text() + '{"step": 11, "lo')
    for step in (1, 9):
        again = replay(done.out_dir, f"--step={step}")
        assert "bit for bit" in again.stdout, again.stderr
    assert rows.read_text().endswith('"lo')


def test_a_log_of_before_that_rolled_back_is_computed_from_there(good, replay):
    """Until 2026-11-28 a run could go back by itself, to go on with other data."""
    rows = good.out_dir / "metrics.jsonl"
    lines = rows.read_text().splitlines(keepends=True)
    (saved,) = (n for n, line in enumerate(lines) if '"saved"' in line and '"step": 6' in line)
    undone = [{"kind": "event", "step": 7, "event": "saved", "sha256": "of before"}]
    undone.append({"kind": "event", "step": 6, "event": "rollback", "why": "not finite"})
    lines.insert(saved, "".join(json.dumps(row) + "\n" for row in undone))
    rows.write_text("".join(lines))
    again = replay(good.out_dir, "--verify=true")
    assert "ckpt_00000006.pt to step 12" in again.stdout, again.stderr
    for path in good.out_dir.glob("*_00000006.pt"):
        path.unlink()
    assert "other data after step 6" in replay(good.out_dir, "--step=7", code=2).stderr


@pytest.mark.slow  # a minute
@pytest.mark.parametrize("shard", [False, True])
def test_runs_with_two_ranks_come_out_again(python_train, shard):
    def typed(*words):
        _, *launcher = torchrun(2)
        return run_python(*launcher, "replay.py", *words)

    flags = (*SAVES, f"--shard={shard}")
    done = python_train("run", *flags, launcher=torchrun(2))
    for what in ("--step=7", "--verify=true"):
        again = typed(done.out_dir, what)
        assert again.returncode == 0, again.stderr
        assert "bit for bit" in again.stdout
    page = (done.out_dir / "replay_00000007.md").read_text()
    assert "Sequence 55" in page, "of both ranks"
    assert "| blocks.0.attention.qkv.weight |" in page
    other = python_train("other", *flags, "--beta2=0.9", launcher=torchrun(2))
    again = typed(done.out_dir, f"--against={other.out_dir}")
    assert again.returncode == 1, again.stderr
    assert "beta2: 0.95, 0.9" in again.stdout
    assert "the first difference in step 2: at its start: " in again.stdout
    again = typed(done.out_dir, f"--against={other.out_dir}", "--step=1")
    assert "the first difference in step 1: after it: model/" in again.stdout
    edit(done, edited(6, loss=1.0))
    assert typed(done.out_dir, "--verify=true").returncode == 1


# ---- two runs ------------------------------------------------------------------------------------


def test_equal_runs_are_equal(once, run_train, replay):
    one = once(*PART)
    other = run_train("other", *PART)
    again = replay(one.out_dir, f"--against={other.out_dir}")
    assert "equal: all numbers of the steps up to 12" in again.stdout


FORWARD = """
import model
def forward(self, x, *rest, own=model.MLP.forward):
    y = own(self, x, *rest)
    return y * 1.001 if train.last_run and train.last_run.state["step"] == 5 else y
model.MLP.forward = forward
"""
MOVED = """
if run.state["step"] == 5:
    next(run.model.parameters()).data.mul_(1.01)
"""
OPTIMIZER = around("update", then=MOVED)
PLANTS = {  # name -> (flags of the other, its source, step of the rows, first thing)
    "optimizer": ((), OPTIMIZER, 7, "in step 6: after it: model/embedding.token.weight"),
    "forward": ((), FORWARD, 6, "in step 6: output of blocks.0.mlp:"),
    "knob": (("--weight_decay=0.2",), "", 2, "in step 1: after it: model/embedding.token.weight"),
    "seed": (("--seed=2",), "", 0, "in step 1: at its start: model/embedding.token.weight"),
}


@pytest.mark.parametrize("name", first(3, PLANTS))
def test_where_two_runs_part_is_found(once, run_fork, replay, name, tmp_path):
    flags, source, step, first = PLANTS[name]
    one = once(*PART)
    other = run_fork("other", *PART, *flags, source=source)
    script = f"--script={tmp_path}/other_fork.py"
    again = replay(one.out_dir, f"--against={other.out_dir}", script, code=1)
    assert f"the runs part at step {step}: " in again.stdout
    assert f"both are computed again; the first difference {first}" in again.stdout
    assert ("weight_decay: 0.1, 0.2" in again.stdout) == (name == "knob")
    if name == "optimizer":
        words = [f"--against={other.out_dir}", script, "--step=5"]
        assert "no tensor differs" in replay(one.out_dir, *words, code=1).stdout


# ---- all steps again -----------------------------------------------------------------------------


def test_a_good_run_is_verified(good, replay):
    before = tree(good.out_dir)
    again = replay(good.out_dir, "--verify=true")
    assert "from its beginning to step 12" in again.stdout
    assert "steps 1 to 12: all logged numbers are computed again, bit for bit" in again.stdout
    assert "covered: 20 rows" in again.stdout
    assert "not covered: rows removed from the end" in again.stdout
    assert tree(good.out_dir) == before
    part = replay(good.out_dir, "--verify=true", "--since=7", "--step=11")
    assert "from ckpt_00000006.pt to step 11" in part.stdout and "steps 7 to 11" in part.stdout


def test_a_run_that_was_stopped_and_extended_is_verified(run_train, replay):
    flags = (*SAVES, "--keep_last=1")
    run_train("run", *flags, before=stop_at(7), code=143)
    run_train("run", *flags)
    done = run_train("run", *flags, "--max_steps=18", "--decay_steps=12")
    assert "steps 1 to 18: all" in replay(done.out_dir, "--verify=true").stdout
    edit(done, edited(9, loss=1.0))
    again = replay(done.out_dir, "--verify=true", code=1)
    assert "here: step 9: loss 1.0 then" in again.stdout


@pytest.mark.parametrize("flag", ["peak_lr=5e-4", "eval_interval=3", "batch_size=4"])
def test_a_flag_changed_at_a_resume_is_followed(flag, run_train, replay):
    """Also in a run that was killed between the two, and went on from an older checkpoint."""
    flags = "--save_interval=4 --eval_interval=2 --best_metric=val_tokens --keep_last=3".split()
    run_train("run", *flags, before=stop_at(7), code=143)  # no new best
    killed = run_train("run", *flags, "--weight_decay=0.3", before=stop_at(11, "SIGKILL"), code=137)
    for step in (8, 7):
        killed.checkpoint(step).unlink()
    more = ["--accum_steps=2"] if flag.startswith("batch_size") else []
    done = run_train("run", *flags, f"--{flag}", *more)
    assert [event["step"] for event in events(done, "resume")] == [7, 4]
    again = replay(done.out_dir, "--verify=true")
    assert "steps 1 to 12: all" in again.stdout
    forged = events(done, "resume")[-1]["changed"] | {"peak_lr": [2e-3, 1e-3]}
    edit(done, edited(4, "resume", changed=forged))
    assert "step 0: sha256 " in replay(done.out_dir, "--verify=true", code=1).stdout


def test_what_else_had_changed_is_told(run_train, replay):
    run_train("run", *SAVES, before=stop_at(7), code=143)
    done = run_train("run", *SAVES)
    edit(done, edited(7, "resume", changed={"model.py": ["a", "b"]}))
    assert "model.py" not in replay(done.out_dir, "--verify=true").stdout
    edit_facts(done, lambda facts: facts["run"].update(torch="2.0.0"))
    edit(done, edited(9, loss=1.0))
    again = replay(done.out_dir, "--verify=true", code=1)
    assert "known to have changed: model.py, torch" in again.stdout


def test_steps_after_the_last_save_of_a_killed_run_are_computed_again(run_train, replay):
    done = run_train("run", *SAVES, "--log_interval=1", before=stop_at(11, "SIGKILL"), code=137)
    assert done.rows("train")[-1]["step"] == 10
    assert "steps 1 to 10: all" in replay(done.out_dir, "--verify=true").stdout
    edit(done, edited(10, loss=1.0))
    assert "step 10: loss" in replay(done.out_dir, "--verify=true", code=1).stdout


def test_an_honest_run_that_was_killed_in_an_evaluation_is_verified(run_train, replay):
    kill = around("evaluate", "if run.state['step'] == 6: os.kill(os.getpid(), 9)")
    done = run_train("run", *SAVES, "--log_interval=1", before=kill, code=137)
    assert done.rows("train")[-1]["step"] == 6 and not done.rows("eval")[1:]
    assert "steps 1 to 6: all" in replay(done.out_dir, "--verify=true").stdout


def test_a_start_that_failed_changes_no_knobs(run_train, replay):
    run_train("run", *SAVES, before=stop_at(7), code=143)
    typo = around("train_step", "undefined")
    failed = run_train("run", *SAVES, "--peak_lr=5e-4", before=typo, code=1)
    for done in (failed, run_train("run", *SAVES)):
        last = done.facts["state"]["step"]
        assert f"steps 1 to {last}: all" in replay(done.out_dir, "--verify=true").stdout


def test_a_swapped_dataset_is_found(run_train, replay, data_dir, tmp_path):
    text = (data_dir / "small.txt").read_text()
    make_dataset(tmp_path, "small", text)
    done = run_train("run", *SAVES, f"--data_dir={tmp_path}")
    replay(done.out_dir, "--verify=true")
    shutil.rmtree(tmp_path / "small")
    make_dataset(tmp_path, "small", text[::-1])
    again = replay(done.out_dir, "--verify=true", code=1)
    assert "step 0: val_loss " in again.stdout and "known to have changed: data" in again.stdout


def edit_number(step, kind, name):
    """A change to a run: one number of a row, by the smallest part of it."""

    def change(done):
        (value,) = (row[name] for row in done.rows(kind) if row["step"] == step)
        edit(done, edited(step, kind, **{name: value * (1 + 2**-52)}))

    return change


def without(step, kind):
    def change(done):
        is_it = edited(step, kind, gone=True)
        edit(done, lambda row: None if "gone" in is_it(row) else row)

    return change


def with_row(step):
    """A change: a train row more, with the numbers of the last one and another loss."""

    def change(done):
        row = done.rows("train")[-1] | {"step": step, "loss": 1.0}
        with open(done.out_dir / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")

    return change


def one_step_more(done):
    """A change: a train row more, in a log that says that the run ended after it."""
    edit(done, lambda row: row | {"step": 13} if row.get("event") == "end" else row)
    with_row(13)(done)


def save_again(done):
    """A change: one weight of a checkpoint, which is saved again, with its hash."""
    from plumbing.checkpoint import digest_of_state

    checkpoint = torch.load(done.checkpoint(8), weights_only=True)
    checkpoint["model"]["head.weight"][0, 0] += 1e-6
    torch.save(checkpoint, done.checkpoint(8))
    edit(done, edited(8, "saved", sha256=digest_of_state(checkpoint)))


def other_seed(done):
    edit_facts(done, lambda facts: facts["run"].update(seed=1))


FORGERIES = {  # name -> (what was done to a good run, what --verify says)
    "loss": (edit_number(6, "train", "loss"), "step 6: loss "),
    "val_loss": (edit_number(6, "eval", "val_loss"), "step 6: val_loss "),
    "a train row cut": (without(6, "train"), "step 6: train row absent then, present now"),
    "a train row twice": (with_row(12), "step 12: loss 1.0 then"),
    "a train row more": (one_step_more, "ends before step 13"),
    "saves cut": (without(8, "saved"), "ckpt_00000008.pt is not what was saved"),
    "damaged": (
        lambda done: flip_a_bit(done.checkpoint(8)),
        "ckpt_00000008.pt is damaged: a checksum is wrong, it is cut off, or no checkpoint; "
        "to go on without it: mv ",
    ),
    "weight and hash": (save_again, "step 8: sha256 "),
    "seed": (other_seed, "step 0: val_loss "),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_is_found_and_named(good, replay, name):
    """The control is test_a_good_run_is_verified."""
    forge, words = FORGERIES[name]
    forge(good)
    again = replay(good.out_dir, "--verify=true", code=1)
    assert words in again.stdout + again.stderr


# ---- what it refuses -----------------------------------------------------------------------------


def test_bad_input_is_one_line(good, replay, tmp_path):
    for typed_words, words in (
        ((tmp_path / "none", "--step=3"), "holds no run"),
        ((good.out_dir,), "expected RUN"),
        ((good.out_dir, "--step=99"), f"--step=99 --since=0: {good.out_dir} has the steps 1 to 12"),
        ((good.out_dir, "--step=3", f"--script={tmp_path}/none.py"), "there is no such file"),
    ):
        again = replay(*typed_words, code=2)
        assert len(again.stderr.splitlines()) == 1, again.stderr
        assert words in again.stderr and "computing" not in again.stdout


def test_nothing_is_executed_because_the_run_names_it(good, replay, tmp_path):
    evil = good.out_dir / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")
    edit_facts(good, lambda facts: facts.update(command=[str(evil)]))
    for what in ("--step=7", "--verify=true"):
        again = replay(good.out_dir, what, code=2)
        assert "--script=evil.py" in again.stderr, again.stdout
        assert len(again.stderr.splitlines()) == 1
    assert not (tmp_path / "executed").exists()
    replay(good.out_dir, "--verify=true", f"--script={evil}")
    assert (tmp_path / "executed").exists(), "the control: it is what was typed"


@pytest.mark.parametrize("name, code", [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_replay_that_is_interrupted_says_so_and_blames_no_code(run_train, name, code):
    done = run_train("run", "--max_steps=12")
    main = f"replay.main([{str(done.out_dir)!r}, '--verify=true'])"
    source = "import os, sys, signal, time, replay, train\nfrom plumbing import cli\n"
    source += stop_at(5, name) + f"sys.exit(cli.run_script(lambda: {main}))"
    stopped = run_python("-c", source)
    assert stopped.returncode == code, stopped.stderr
    assert f"interrupted by {name} at step 5 of 12" in stopped.stderr
