"""What a knob may do is written in its comment, and true: one test for all knobs of train.py."""

import pytest
import torch
from conftest import REPO, copy_of_repository, digest, events
from sources import ranks, stop_at

from plumbing.cli import POLICY, read_knobs

KNOBS = read_knobs(REPO / "train.py")
FLAGS = ("--save_interval=4", "--decay_steps=12", "--eval_interval=4")
# For each knob another value, after flags that give it something to do; the rest: see other().
OTHER = {
    "out_dir": "elsewhere",
    "resume": "never",
    "dataset": "other",
    "data_dir": "copy",
    "offline_dataset": "",
    "block_size": 8,
    "n_head": 4,
    "n_embd": 64,
    "batch_size": "4 --accum_steps=2",  # another split of the same product
    "accum_steps": "2 --batch_size=4",
    "prefetch_factor": ("--num_workers=1", 3),
    "optimizer": "adam",
    "schedule": "linear",
    "warmup_steps": 2,
    "max_steps": 16,
    "decay_steps": 11,
    "device": "cpu",
    "dtype": "bfloat16",
    "compile": "true",
    "deterministic": "false",
    "offload": ("--shard=true", "true"),
    "eval_interval": 3,
    "report": "true",
    "best_metric": "-val_accuracy",
    "wandb_project": "mine",
    "wandb_run_name": "mine",
    "patience": 100,
    "save_interval": 3,
    "save_minutes": 1e-9,
}
NEEDS_RANKS = ("shard", "offload")
# How it is computed: `free`, but the bits may be others
HOW = [
    name
    for name in (
        "grad_checkpoint batch_size accum_steps device compile deterministic shard offload"
    ).split()
    if name in KNOBS
]


def other(name):
    """Another value of a knob: the opposite, one more, a tenth less, or one of OTHER."""
    default = KNOBS[name].default
    if name in OTHER:
        return OTHER[name]
    if isinstance(default, bool):
        return not default
    assert isinstance(default, int | float), f"{name} has no case in OTHER"
    return default + 1 if isinstance(default, int) else 0.9 * default or 0.1


def of_policy(word, at_once=False):
    """[(names, flags of both runs, flags of the second)] of the knobs with this word: "fixed",
    "free", "course" (none), or "how": those in HOW.

    at_once: first those that need no flags of their own, all in one run; then each alone, slow.
    """
    cases = []
    names = [name for name, knob in KNOBS.items() if word == (knob.policy or "course")]
    names = [name for name in names if name not in HOW] if word != "how" else list(HOW)
    for name in names:
        value = other(name)
        *flags, value = value if isinstance(value, tuple) else (value,)
        first, *others = f"--{name}={value}".split(" --")  # and what must change with it
        changed = [first, *(f"--{other}" for other in others)]
        is_slow = at_once or name in ("compile", "wandb_log", "offload")
        marks = [pytest.mark.slow] if is_slow else []
        cases.append(pytest.param([name], flags, changed, id=name, marks=marks))
    if at_once:
        cases.insert(0, together([case.values for case in cases]))
    return cases


ALONE = {"out_dir", "data_dir", "wandb_log"}  # they need more than a flag


def together(cases):
    cases = [(names[0], changed) for names, flags, changed in cases if not flags]
    cases = [case for case in cases if case[0] not in ALONE]
    changed = [flag for _, flags in cases for flag in flags]
    return pytest.param([name for name, _ in cases], [], changed, id="all at once")


def test_every_case_is_of_a_knob_and_every_word_is_known():
    assert OTHER.keys() <= KNOBS.keys()
    assert {knob.policy for knob in KNOBS.values()} == {*POLICY, ""}
    assert all(KNOBS[name].policy == "free" for name in HOW)


def essence(done):
    """Hash of all that the next steps depend on, but for what only evaluations need."""
    saved = torch.load(done.checkpoint(12), weights_only=True)
    kept = {name: saved[name] for name in ("model", "optimizer", "scaler", "ema", "rng")}
    state = {name: saved["state"][name] for name in ("step", "sequences", "tokens", "lr_factor")}
    return digest([kept, state])


@pytest.mark.parametrize("names, flags, changed", of_policy("free", at_once=True))
def test_a_free_knob_changes_no_bit(names, flags, changed, once, run_train, data_dir, tmp_path):
    if names == ["data_dir"]:
        (data_dir.parent / "copy").mkdir(exist_ok=True)
        link = data_dir.parent / "copy" / "small"
        if not link.exists():
            link.symlink_to(data_dir / "small")
        changed = [f"--data_dir={link.parent}"]
    env = {"WANDB_MODE": "offline"}
    other = run_train("run", *FLAGS, *flags, "--keep_last=9", *changed, env=env)
    if names == ["out_dir"]:
        other.out_dir = tmp_path / "elsewhere"
    assert essence(other) == essence(once(*FLAGS, *flags))


@pytest.mark.parametrize("names, flags, changed", of_policy("how"))
def test_another_way_to_compute_names_no_folder_and_the_resume_names_it(
    names, flags, changed, run_train
):
    (name,) = names
    before = ranks(2) if name in NEEDS_RANKS else ""
    done = run_train("run", *FLAGS, *flags, "--max_steps=6", before=before)
    if name == "device":  # this machine has only one
        before = "train.resuming.device_name = lambda _: 'another'"
    done = run_train("run", *FLAGS, *flags, *changed, before=before)
    (event,) = events(done, "resume")
    assert name in event["changed"] and not KNOBS[name].names_folder()
    assert [row["compared"] for row in events(done, "resume_checked")] == [0]  # it had finished


@pytest.mark.parametrize("names, flags, changed", of_policy("fixed"))
def test_a_fixed_knob_is_refused_on_a_resume(names, flags, changed, once, run_train, data_dir):
    (name,) = names
    if name == "dataset" and not (data_dir / "other").exists():
        (data_dir / "other").symlink_to(data_dir / "small")
    done = run_train(
        once(*FLAGS, *flags).out_dir, *FLAGS, "--max_steps=14", *flags, *changed, code=2
    )
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert f"{name} changed from" in done.stderr or "dimension" in done.stderr
    assert KNOBS[name].names_folder()


@pytest.mark.parametrize("names, flags, changed", of_policy("course", at_once=True))
def test_a_change_of_the_course_is_recorded_and_names_the_folder(names, flags, changed, run_train):
    run_train("run", "--save_interval=4", *flags, before=stop_at(6), code=143)
    done = run_train("run", "--save_interval=4", *flags, *changed)
    (event,) = events(done, "resume")
    (found,) = events(done, "resume_checked")
    assert found["compared"] == 0  # rows of another course are no witness
    for name in names:
        then, now = event["changed"][name]
        assert then != now
        assert f"{name} {then} -> {now}" in done.stdout
        assert KNOBS[name].names_folder()


def test_a_knob_of_a_fork_names_the_folder_and_a_change_of_it_is_recorded(run_train, tmp_path):
    """A knob without a word, in a copy of train.py: nothing else has to know of it."""
    copy = copy_of_repository(tmp_path / "copy")
    source = (copy / "train.py").read_text(encoding="utf-8")
    knob = "window = 8  # tokens, [1,inf)\nn_head = 4"
    (copy / "train.py").write_text(source.replace("n_head = 4", knob), encoding="utf-8")
    flags = ("--save_interval=4",)
    run_train("run", *flags, before=stop_at(6), repo=copy, code=143)
    done = run_train("run", *flags, "--window=16", repo=copy)
    assert [event["changed"]["window"] for event in events(done, "resume")] == [[8, 16]]
    run_train("none", "--window=0", repo=copy, code=2)
    assert read_knobs(copy / "train.py")["window"].names_folder()
