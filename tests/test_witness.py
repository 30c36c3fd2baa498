"""The log as the witness: rows computed again are compared with those that it already holds."""

import json

import pytest
import torch
from conftest import REPO, apply_patch, copy_of_repository, events
from helpers import evaluation, event, row
from sources import around, stop_at

from plumbing.log import Witness
from reporting import record

OLD = [
    row(1, 4.2),
    evaluation(2, 4.0),
    event(2, "saved", checkpoint="ckpt", sha256="a"),
    row(2, 4.1),
]


def test_rows_that_are_equal_to_the_bit_are_counted():
    witness = Witness(OLD, "val_loss")
    for again in json.loads(json.dumps(OLD)):
        witness.see(again | {"step_ms": 99.0})  # a time is no result
    assert (witness.compared, witness.equal, witness.first_difference) == (4, 4, None)
    assert not witness.old_rows


def test_the_first_difference_is_named_with_both_values():
    witness = Witness(OLD, "val_loss")
    witness.see(row(1, 4.2))
    witness.see(row(2, 4.1 + 1e-15, grad_norm=0.6))
    witness.see(event(2, "saved", checkpoint="ckpt", sha256="b"))
    witness.see(row(3, 3.0))  # which the log does not hold
    found = {"step": 2, "field": "loss", "then": 4.1, "now": 4.1 + 1e-15}
    assert (witness.compared, witness.equal, witness.first_difference) == (3, 1, found)
    assert list(witness.old_rows) == [(2, "eval")]  # which nothing computed again


OF_A_FORK = evaluation(2, 4.0) | {"ms": 1.0, "top5": 0.5, "best_top5": 0.5}


@pytest.mark.parametrize(
    "old, change, field",
    [
        (row(1, None), {}, None),  # null equals null, and no number
        (row(1, None), {"loss": 0.0}, "loss"),
        (OF_A_FORK, {"ms": 2.0}, None),  # maybe measured
        (OF_A_FORK, {"top5": 0.6}, "top5"),  # selects best.pt
    ],
)
def test_which_fields_decide(old, change, field):
    witness = Witness([old], best_metric="-top5")
    witness.see(old | change)
    assert (witness.first_difference or {}).get("field") == field


# ---- what a resume says --------------------------------------------------------------------------

STEPS = 30
RUN = f"--max_steps={STEPS} --dropout=0.1 --eval_interval=8 --save_interval=10 --log_interval=1"
# By a metric that stays the same: a new best would be a checkpoint, too
RUN = (*RUN.split(), "--keep_last=9", "--best_metric=val_tokens")
HOW = {  # source that ends the first process: rows past its newest checkpoint, of step 10 or 13
    "SIGTERM": stop_at(13),  # 14 and 15, for their rows alone
    "SIGKILL": stop_at(18, "SIGKILL"),  # 11 to 17, and the evaluation of step 16
    "SIGKILL after a save": stop_at(11, "SIGKILL"),
}


@pytest.fixture
def resumed(run_train):
    """resumed(how, *flags, first="", then="", edit=None, more=(), repo=REPO) -> (the event
    `resume_checked`, the event `resume`, Done) of a run that ended by HOW[how] and was started
    again.

    first, then: source of the first and of the second process. edit: called between them with the
    first's Done. more: flags of the second.
    """

    def run(how, *flags, first="", then="", edit=lambda done: None, more=(), repo=REPO):
        done = run_train("run", *RUN, *flags, before=first + HOW[how], repo=repo, code=None)
        assert done.returncode in (143, 137), done.stderr
        edit(done)
        done = run_train("run", *RUN, *flags, *more, before=then, repo=repo)
        (checked,) = events(done, "resume_checked")
        (resume,) = events(done, "resume")
        print("\nRESUME", [line for line in done.stdout.splitlines() if "resumed at" in line][-1])
        assert checked["from"] == resume["step"]
        return checked, resume, done

    return run


def change_checkpoint(change):
    """edit= of resumed(): execute `change` on the newest checkpoint, `c`."""

    def edit(done):
        path = max(done.out_dir.glob("ckpt_*.pt"))
        checkpoint = torch.load(path, weights_only=True)
        exec(change, {"c": checkpoint, "torch": torch})
        torch.save(checkpoint, path)

    return edit


def change_file(path, old, new):
    """edit= of resumed(): edit a source file."""

    def edit(done):
        text = path.read_text()
        assert old in text, old
        path.write_text(text.replace(old, new, 1))

    return edit


def found_at(checked):
    return checked["first_difference"] and checked["first_difference"]["step"]


@pytest.mark.parametrize("how, rows", [("SIGTERM", 2), ("SIGKILL", 8), ("SIGKILL after a save", 0)])
def test_an_honest_resume_says_how_much_was_compared(resumed, how, rows):
    checked, resume, done = resumed(how)
    assert (checked["compared"], checked["equal"], found_at(checked)) == (rows, rows, None)
    assert resume["changed"] == {} and resume["knobs"]["dropout"] == 0.1
    words = f"{min(rows, 7)} steps computed again, every loss and norm the same"
    words = words if rows else "nothing to compare with; changed since: nothing known"
    assert f"resumed at step {resume['step']}: {words}" in done.stdout


LOST = "c['rng'][0]['torch'] = torch.Generator().manual_seed(5).get_state()"
ZERO = (
    "[s[k].zero_() for o in c['optimizer'] for s in o['state'].values() for k in s if 'exp' in k]"
)


@pytest.mark.parametrize("how, first", [("SIGTERM", 14), ("SIGKILL", 11)])
@pytest.mark.parametrize(
    "change, later", [(ZERO, 1), (LOST, 0)], ids=["zeroed moments", "lost random state"]
)
def test_what_a_checkpoint_has_lost_is_found(resumed, how, first, change, later):
    """Moments show one step after weights: hence two steps after a signal."""
    checked, resume, done = resumed(how, edit=change_checkpoint(change))
    assert found_at(checked) == first + later
    assert f"other numbers from step {first + later} on: " in done.stdout
    assert done.returncode == 0  # it is said, and the run goes on


@pytest.fixture
def copy(tmp_path):
    return copy_of_repository(tmp_path / "copy")


EDITS = {  # name: (file, old, new, flags, first step that differs after a SIGTERM in step 13)
    "another constant": ("model.py", "10_000.0", "9_000.0", (), 14),
    "the optimizer alone": ("optim.py", "2.0315", "2.1", ("--optimizer=muon",), 15),
    "a comment": ("model.py", "import torch\n", "import torch  # a comment\n", (), None),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_named_and_what_it_does_is_measured(resumed, copy, name):
    file, old, new, flags, step = EDITS[name]
    edit = change_file(copy / file, old, new)
    checked, resume, done = resumed("SIGTERM", *flags, edit=edit, repo=copy)
    assert list(resume["changed"]) == [file]
    assert found_at(checked) == step and checked["equal"] == {14: 0, 15: 1, None: 2}[step]


def test_rows_at_another_rate_are_no_witness(run_train):
    """A rate changed at a resume, killed, and changed back; each time nothing was compared."""
    said = "resumed at step 10: 8 rows past here were computed with peak_lr {}: no witness"
    killed = stop_at(18, "SIGKILL")
    run_train("run", *RUN, before=killed, code=137)
    done = run_train("run", *RUN, "--peak_lr=2e-3", before=killed, code=137)
    assert said.format(0.001) in done.stdout
    done = run_train("run", *RUN, before=killed, code=137)
    assert said.format(0.002) in done.stdout
    assert [row["compared"] for row in events(done, "resume_checked")] == [0, 0]
    done = run_train("run", *RUN)
    checked = events(done, "resume_checked")[-1]
    assert checked["compared"] == checked["equal"] == 8
    assert [row["changed"].keys() for row in events(done, "resume")] == [{"peak_lr"}, set(), set()]


OTHER_GRADIENT = around(
    "forward_backward", then="[w.grad.mul_(1.01) for w in run.model.parameters() if run.batches]"
)
FAILS = {  # source of a process that computes no row -> its exit code
    "a kill": (stop_at(11, "SIGKILL"), 137),
    "a typo": (around("train_step", "undefined"), 1),
}


@pytest.mark.parametrize("how", FAILS)
def test_a_process_that_fails_before_its_first_row_leaves_the_old_ones_to_the_next(run_train, how):
    done = run_train("run", *RUN, before=HOW["SIGKILL"], code=137)
    rows = done.rows("train") + done.rows("eval")
    source, code = FAILS[how]
    failed = run_train("run", *RUN, "--peak_lr=2e-3", before=OTHER_GRADIENT + source, code=code)
    assert failed.rows("train") + failed.rows("eval") == rows
    assert not events(failed, "resume_checked")
    assert failed.facts["config"]["peak_lr"] == done.facts["config"]["peak_lr"]
    assert record.read_run(failed.out_dir).train["step"][-1] == 10  # a report shows it up to there
    done = run_train("run", *RUN, before=OTHER_GRADIENT)
    assert [found_at(row) for row in events(done, "resume_checked")] == [11]
    assert done.facts["config"]["peak_lr"] == 1e-3
    steps = [row["step"] for row in done.rows("train")]
    assert steps == list(range(1, STEPS + 1))


def test_rows_of_other_data_accuse_no_one(run_train):
    """As a rollback left them, until 2026-11-28."""
    stopped = run_train("run", *RUN, before=stop_at(16, "SIGKILL"), code=137)
    log = stopped.out_dir / "metrics.jsonl"
    rows = stopped.rows()
    past = [each for each in rows if each["kind"] == "train" and each["step"] > 10]
    for each in past:
        each.update(sequences=each["sequences"] + 8, loss=9.0)
    assert past
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert events(run_train("run", *RUN), "resume_checked") == []


def test_the_two_steps_after_a_signal_leave_only_their_rows(run_train):
    """The run, its files and what train.last_run holds are of step 13."""
    after = """
def compare():
    saved = torch.load("run/ckpt_00000013.pt", weights_only=True)
    same = [torch.equal(w, train.last_run.model.state_dict()[n]) for n, w in saved["model"].items()]
    print("LAST RUN", all(same), train.last_run.state["step"], flush=True)
inner_main = train.main
def main(*args):
    code = inner_main(*args)
    compare()
    return code
train.main = main
"""
    done = run_train("run", *RUN, before=HOW["SIGTERM"] + after, code=143)
    assert "LAST RUN True 13" in done.stdout
    assert [row["step"] for row in done.rows("train")][-2:] == [14, 15]
    assert "stopped by SIGTERM at step 13" in done.stdout and done.facts["state"]["step"] == 13
    assert events(done, "end")[0]["step"] == 13
    names = {path.name for path in done.out_dir.glob("*.pt")}
    assert names == {"best.pt", *(f"ckpt_{step:08}.pt" for step in (0, 10, 13))}


SLOW = around("finish_rows", then="for each in result: each['step_ms'] = 1501.0")


def test_no_step_is_taken_where_two_would_take_more_than_three_seconds(run_train):
    done = run_train("run", *RUN, before=HOW["SIGTERM"] + SLOW, code=143)
    assert done.rows("train")[-1]["step"] == 13
    done = run_train("run", *RUN)
    assert [row["compared"] for row in events(done, "resume_checked")] == [0]


EVEN = ("--plateau_factor=0.5", "--plateau_patience=1", "--min_delta=1", "--eval_interval=2")


def test_one_row_where_an_evaluation_that_may_change_the_rate_falls_between_two(run_train):
    stopped = run_train("run", *RUN, *EVEN, before=HOW["SIGTERM"], code=143)
    assert stopped.rows("train")[-1]["step"] == 14
    (checked,) = events(run_train("run", *RUN, *EVEN), "resume_checked")
    assert (checked["compared"], checked["equal"]) == (1, 1)


WAITS = """
import threading
inner = train.ShuffledWindows.__getitem__
def slow(self, place):
    if place[0] == 13 * 8:  # the batch of step 14
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        time.sleep({seconds})
    return inner(self, place)
train.ShuffledWindows.__getitem__ = slow
"""


@pytest.mark.parametrize("seconds, step, rows", [(0.4, 14, 16), (60, 13, 13)])
def test_a_stop_while_data_is_waited_for_gives_the_batch_a_second(seconds, step, rows, run_train):
    before = WAITS.format(seconds=seconds)
    done = run_train("run", *RUN, "--log_interval=1", before=before, code=143, timeout=20)
    assert done.facts["state"]["step"] == step and done.checkpoint(step).exists()
    assert done.rows("train")[-1]["step"] == rows


# ---- forks with state that no checkpoint holds ---------------------------------------------------

FORKS = {  # tests/hacks/NAME.patch: (flags, step found after SIGTERM in 13, after SIGKILL in 18)
    "clip_by_history": (("--grad_clip=9",), 15, 14),
    "plateau_in_globals": (("--eval_interval=4", "--peak_lr=1e-4"), 14, 11),
    "average_in_globals": (("--eval_interval=2",), None, 12),
    "lookahead": ((), 15, 15),
}


@pytest.mark.parametrize("how", ["SIGTERM", "SIGKILL"])
@pytest.mark.parametrize("name", FORKS)
def test_hidden_state_is_found_where_a_compared_row_shows_it(resumed, copy, name, how):
    """Not before: what wakes after the two steps of a signal is missed there, and found after a
    kill."""
    flags, *steps = FORKS[name]
    apply_patch((REPO / "tests" / "hacks" / f"{name}.patch").read_text(), copy)
    checked, resume, _ = resumed(how, *flags, repo=copy)
    assert found_at(checked) == steps[how == "SIGKILL"]
    assert resume["changed"] == {}
