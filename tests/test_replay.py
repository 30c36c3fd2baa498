"""Replay: any step again, where two runs part, whether a log is what the code computes."""

import dataclasses
import json
import shutil
import subprocess

import pytest
import torch
from conftest import REPO, events, first, make_dataset, tree
from helpers import torchrun
from sources import around, bad_batches, stop_at

SAVES = ("--save_interval=4", "--eval_interval=6", "--keep_last=9", "--milestone_interval=6")
PART = ("--save_interval=4", "--keep_last=9")
# In the helper's child, replay.py runs in place of train.py, and forks where it starts a process
REPLAY = """
import sys
import replay
def apart(argv):
    if (child := os.fork()) == 0:
        try:
            replay.main(argv)
        except BaseException as error:
            print(f"in its own process: {{error!r}}", file=sys.stderr, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
def main(argv=None, watch=None, own=train.main):
    return replay.main({argv!r}) if argv is None else own(argv, watch)
replay.in_process_of_its_own = apart
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


def edited(step, **fields):
    def change(row):
        return row | fields if row["kind"] == "train" and row["step"] == step else row

    return change


# ---- one step ------------------------------------------------------------------------------------


def test_a_step_comes_out_again_and_nothing_else_changes(good, replay):
    done = good
    before = tree(done.out_dir)
    again = replay(done.out_dir, "--step=7")
    assert "milestone_00000006.pt to step 7" in again.stdout
    assert "all logged numbers are computed again, bit for bit" in again.stdout
    new = tree(done.out_dir)
    assert new.keys() - before.keys() == {"replay_00000007.md", "replay_00000007.png"}
    assert {name: new[name] for name in before} == before
    page = (done.out_dir / "replay_00000007.md").read_text()
    row = done.rows("train")[6]
    assert str(row["loss"]) in page and str(row["grad_norm"]) in page
    for name in ("Sequence 48", "blocks.0.attention.qkv.weight", "| blocks.0 |", "all tensors are"):
        assert name in page, name


def test_a_run_may_be_asked_while_it_goes_on_at_its_first_step_too(run_train, replay):
    flags = ("--dropout=0.1", "--ema_decay=0.9", "--optimizer=muon", "--accum_steps=2")
    done = run_train("run", *SAVES, *flags, before=stop_at(10), code=143)
    rows = done.out_dir / "metrics.jsonl"
    rows.write_text(rows.read_text() + '{"step": 11, "lo')
    for step in (1, 9):
        again = replay(done.out_dir, f"--step={step}")
        assert "bit for bit" in again.stdout, again.stderr
    assert rows.read_text().endswith('"lo')


def test_the_saved_state_starts_a_new_folder_with_that_step(good, run_train, replay):
    done = good
    again = replay(done.out_dir, "--step=7", "--save=true")
    assert "--resume=" in again.stdout
    new = run_train("new", f"--resume={done.out_dir}/replay_00000007.pt", *SAVES)
    losses = [row["loss"] for row in done.rows("train")]
    assert [row["loss"] for row in new.rows("train")] == losses[6:]


def test_a_step_before_a_rollback_and_the_same_one_after_it(run_train, replay):
    bad = "train.MOST_SKIPPED = 2\n" + bad_batches([8, 9])
    done = run_train("run", "--save_interval=4", "--log_interval=1", before=bad)
    (event,) = events(done, "rollback")
    assert (event["step"], event["at_step"]) == (8, 10)
    after = [row["step"] for row in done.rows("event") if row["event"] == "saved"]
    assert after == [0, 4, 8, 8, 12], "it saves right after the rollback"
    logged = replay(done.out_dir, "--step=10", before=bad)
    assert "ckpt_00000008.pt" in logged.stdout and "all tensors are finite" in logged.stdout
    undone = replay(done.out_dir, "--step=10", "--before_rollback=1", before=bad)
    assert "not finite: forward pass: loss" in undone.stdout
    verified = replay(done.out_dir, "--verify=9", before=bad)
    assert "12 of 12 steps" in verified.stdout


@pytest.mark.slow  # a minute
@pytest.mark.parametrize("shard", [False, True])
def test_runs_with_two_ranks_come_out_again(python_train, shard):
    def typed(*words):
        command = [*torchrun(2), REPO / "replay.py", *words]
        return subprocess.run(command, capture_output=True, text=True)

    flags = (*SAVES, f"--shard={shard}")
    done = python_train("run", *flags, launcher=torchrun(2))
    for what in ("--step=7", "--verify=2"):
        again = typed(done.out_dir, what)
        assert again.returncode == 0, again.stderr
    assert "all bits equal" in again.stdout
    page = (done.out_dir / "replay_00000007.md").read_text()
    assert "Sequence 111" in page, "of both ranks"
    assert "| blocks.0.attention.qkv.weight |" in page
    other = python_train("other", *flags, "--beta2=0.9", launcher=torchrun(2))
    again = typed(done.out_dir, other.out_dir)
    assert again.returncode == 1
    assert "the first difference in step 1: setting: betas/1 (0.95 and 0.9)" in again.stdout


# ---- two runs ------------------------------------------------------------------------------------


def test_equal_runs_are_equal(once, run_train, replay):
    one = once(*PART)
    other = run_train("other", *PART)
    again = replay(one.out_dir, other.out_dir)
    assert "equal: all numbers of 12 steps" in again.stdout


RATE = around("lr_at", then="result *= 1.5 if args[0] >= 5 else 1")
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
PLANTS = {  # name -> (flags of both, flags of the other, its source, step of the rows, first thing)
    "knob": ((), ("--weight_decay=0.2",), "", 2, "in step 1: setting: weight_decay"),
    "rate": ((), (), RATE, 6, "in step 6: learning rate"),
    "forward": ((), (), FORWARD, 6, "in step 6: output of blocks.0.mlp:"),
    "optimizer": ((), (), OPTIMIZER, 7, "in step 6: after it: model/embedding.token.weight"),
    "seed": ((), ("--seed=2",), "", 0, "before step 1"),
}


@pytest.mark.parametrize("name", first(3, PLANTS))
def test_where_two_runs_part_is_found(once, run_fork, replay, name, tmp_path):
    flags, other_flags, source, step, first = PLANTS[name]
    one = once(*PART, *flags)
    other = run_fork("other", *PART, *flags, *other_flags, source=source)
    again = replay(one.out_dir, other.out_dir, f"--script={tmp_path}/other_fork.py", code=1)
    assert f"the runs part at step {step}: " in again.stdout
    assert first in again.stdout
    assert "both are computed again" in again.stdout


# ---- a stretch again -----------------------------------------------------------------------------


def test_a_good_run_is_verified(good, replay):
    before = tree(good.out_dir)
    again = replay(good.out_dir, "--verify=9")
    assert "12 of 12 steps computed again: all bits equal" in again.stdout
    assert tree(good.out_dir) == before
    some = replay(good.out_dir, "--verify=1", "--seed=3")
    assert "4 of 12 steps" in some.stdout and "--seed=3" in some.stdout


def test_a_run_that_was_stopped_and_extended_is_verified(run_train, replay):
    flags = (*SAVES, "--keep_last=1")
    run_train("run", *flags, before=stop_at(7), code=143)
    run_train("run", *flags)
    done = run_train("run", *flags, "--max_steps=18", "--decay_steps=12")
    again = replay(done.out_dir, "--verify=9")
    assert "milestone_00000006.pt to step 12" in again.stdout and "18 of 18 steps" in again.stdout
    edit(done, edited(9, loss=1.0))
    again = replay(done.out_dir, "--verify=9", code=1)
    assert "step 9 of" in again.stdout and "resumed" not in again.stdout


@pytest.mark.parametrize("flag", ["peak_lr=5e-4", "eval_interval=3", "eval_tokens=64"])
def test_a_flag_changed_at_a_resume_is_no_forgery(flag, run_train, replay):
    flags = ("--save_interval=4", "--keep_last=1", "--eval_interval=2")
    run_train("run", *flags, before=stop_at(7), code=143)
    done = run_train("run", *flags, f"--{flag}")
    again = replay(done.out_dir, "--verify=9", code=3)
    assert f"{flag.partition('=')[0]} changed when it resumed at step 7, which" in again.stdout


@pytest.mark.parametrize("hash_too", [False, True])
def test_a_changed_weight_that_was_saved_again_is_found(good, replay, hash_too):
    from plumbing.checkpoint import digest_of_state

    path = good.checkpoint(8)
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["model"]["head.weight"][0, 0] += 1e-6
    torch.save(checkpoint, path)
    if hash_too:
        new = digest_of_state(checkpoint)
        saved = ("saved", 8)
        edit(good, lambda r: r | {"sha256": new} if (r.get("event"), r["step"]) == saved else r)
    again = replay(good.out_dir, "--verify=9", code=1)
    assert ("step 8 of" if hash_too else "ckpt_00000008.pt is not what was saved") in again.stdout


def test_a_swapped_dataset_is_found(run_train, replay, data_dir, tmp_path):
    text = (data_dir / "small.txt").read_text()
    make_dataset(tmp_path, "small", text)
    done = run_train("run", *SAVES, f"--data_dir={tmp_path}")
    shutil.rmtree(tmp_path / "small")
    make_dataset(tmp_path, "small", text[::-1])
    again = replay(done.out_dir, "--verify=9", code=1)
    assert "was trained on other data" in again.stderr


def edit_facts(done, change):
    path = done.out_dir / "run.json"
    facts = json.loads(path.read_text())
    change(facts)
    path.write_text(json.dumps(facts))


def edit_step_6(name):
    """A change to a run: one number of a row, by the smallest part of it."""

    def change(done):
        value = done.rows("train")[5][name]
        edit(done, edited(6, **{name: value * (1 + 2**-20)}))

    return change


def edit_checkpoint(done, change):
    checkpoint = torch.load(done.checkpoint(12))
    change(checkpoint)
    torch.save(checkpoint, done.checkpoint(12))


def damage_all(done):
    for path in done.out_dir.glob("*.pt"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


def invent_rows(done):
    rows = done.rows("train")
    with open(done.out_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps(rows[-1] | {"step": 13}) + "\n")


def drop_last_rows(done):
    edit(done, lambda row: None if row["step"] > 10 else row)
    for path in (done.checkpoint(12), done.out_dir / "best.pt"):
        path.unlink()
    shutil.copy(done.checkpoint(8), done.out_dir / "best.pt")


FORGERIES = {  # name -> (what was done to a good run, what --verify says)
    "loss": (edit_step_6("loss"), "step 6 of {} is not what this code computes here: loss"),
    "lr": (edit_step_6("lr"), "step 6 of {} is not what this code computes here: lr"),
    "a row": (
        lambda done: edit(done, lambda row: None if row == done.rows("train")[5] else row),
        "0 and 1 rows of kind train",
    ),
    "hashes": (
        lambda done: edit(done, lambda row: None if row.get("event") == "saved" else row),
        "ckpt_00000012.pt",
    ),
    "damaged": (damage_all, "ckpt_00000012.pt is damaged: "),
    "older best": (
        lambda done: shutil.copy(done.checkpoint(4), done.out_dir / "best.pt"),
        "best.pt holds step 4; by the log it is of step 12",
    ),
    "no best": (lambda done: (done.out_dir / "best.pt").unlink(), "best.pt is missing"),
    "no newest": (lambda done: done.checkpoint(12).unlink(), "ckpt_*.pt holds step 8"),
    "no milestone": (
        lambda done: (done.out_dir / "milestone_00000006.pt").unlink(),
        "milestone_00000006.pt is missing: it was saved at step 6",
    ),
    "invented": (invent_rows, "has 13 steps in its log; by its run.json it ended at step 12"),
    "dropped": (drop_last_rows, "has 10 steps in its log; by its run.json it ended at step 12"),
    "frozen": (
        lambda done: edit_checkpoint(done, lambda c: c["frozen"].append("head.weight")),
        "frozen in ckpt_00000012.pt is ['head.weight'], not []",
    ),
    "schedule": (
        lambda done: edit_checkpoint(done, lambda c: c["run"]["kept"].update(decay_steps=99)),
        "decay_steps in ckpt_00000012.pt is 99, not 12",
    ),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_is_found_and_named(good, replay, name):
    forge, words = FORGERIES[name]
    forge(good)
    again = replay(good.out_dir, "--verify=9", code=1)
    assert words.format(good.out_dir) in again.stdout


def test_steps_after_the_last_save_of_a_killed_run_are_computed_again(run_train, replay):
    done = run_train("run", *SAVES, "--log_interval=1", before=stop_at(11, "SIGKILL"), code=137)
    assert done.rows("train")[-1]["step"] == 10
    again = replay(done.out_dir, "--verify=9")
    assert "10 of 10 steps" in again.stdout, again.stdout + again.stderr
    assert "not covered: finite step_ms" in again.stdout
    edit(done, edited(10, loss=1.0))
    again = replay(done.out_dir, "--verify=1", "--seed=1", code=1)  # whichever are drawn
    assert f"step 10 of {done.out_dir} is not what" in again.stdout
    edit(done, lambda row: row | {"step": 16} if row["step"] == 10 else row)
    again = replay(done.out_dir, "--verify=9", code=1)
    assert "finished at step 12, and does not reach step 16" in again.stderr


# ---- what it refuses -----------------------------------------------------------------------------


def test_bad_input_is_one_line(good, replay, tmp_path):
    for typed_words, words in (
        ((tmp_path / "none", "--step=3"), "holds no run"),
        ((good.out_dir,), "expected RUN"),
        ((good.out_dir, "--step=99"), f"--step=99: {good.out_dir} has 12 steps"),
        ((good.out_dir, "--step=3", "--before_rollback=1"), "there were 0 rollbacks"),
        ((good.out_dir, "--step=3", f"--script={tmp_path}/none.py"), "there is no such file"),
    ):
        again = replay(*typed_words, code=2)
        assert len(again.stderr.splitlines()) == 1, again.stderr
        assert words in again.stderr and "computing" not in again.stdout


def test_nothing_is_executed_because_the_run_names_it(good, replay, tmp_path):
    evil = good.out_dir / "evil.py"
    evil.write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\n")

    def change(facts):
        facts["command"] = [str(evil)]
        facts["run"]["code"][str(evil)] = ["0", "0"]

    edit_facts(good, change)
    for what in ("--step=7", "--verify=1"):
        again = replay(good.out_dir, what, code=2)
        assert "--script=evil.py" in again.stderr, again.stdout
        assert len(again.stderr.splitlines()) == 1
    assert not (tmp_path / "executed").exists()


FORMS = [
    lambda facts: facts.update(config=None),
    lambda facts: facts.update(command=[3]),
    lambda facts: facts["run"].update(code=["train.py"]),
    lambda facts: facts["run"].update(threads="2"),
    lambda facts: facts.update(run=[]),
    lambda facts: facts["config"].update(n_embd="x"),
    lambda facts: facts["config"].update(unknown=1),
]


def test_a_run_json_of_another_form_is_one_line(good, replay):
    kept = (good.out_dir / "run.json").read_text()
    for number, change in enumerate(FORMS):
        edit_facts(good, change)
        again = replay(good.out_dir, "--step=7", code=2)
        assert len(again.stderr.splitlines()) == 1, (number, again.stderr)
        assert str(good.out_dir) in again.stderr
        (good.out_dir / "run.json").write_text(kept)
