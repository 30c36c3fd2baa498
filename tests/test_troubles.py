"""Each detector finds its trouble in a run that has it, and says nothing of a good run.

The runs are real and take about a second; memory over a long run is recorded rows."""

import re
import shlex

import numpy as np
import pytest
from conftest import REPO, first, make_dataset, pydoc_text
from helpers import falling, write_run
from sources import around, bad_batches

from reporting import detectors
from reporting.record import read_run
from reporting.troubles import texts, troubles

SPEED = {"step_ms": 5.0, "data_ms": 0.1, "tokens_per_sec": 1e5}  # of a machine that is not busy
CONSTANT = "--schedule=constant --warmup_steps=5 --grad_clip=0 --batch_size=64 --max_steps=140"


def slow(what, milliseconds):
    """Source for run_train's `before`: from step 30 on `what` of train.py takes longer."""
    wait = f"taken.append(1)\ntime.sleep({milliseconds / 1000} * (len(taken) > 30))"
    return "taken = []\n" + around(what, wait)


HOOK = "result.head.register_forward_pre_hook(lambda head, x: (x[0] - 1e4).relu())"
DEAD = around("build_model", then=HOOK)
KEEPS = "kept = []\n" + around("train_step", "kept.append(torch.ones(2_000_000))")
FULL = around("forward_backward", 'if run.state["micro_batch"] > 2:\n    raise MemoryError')
REAL = {  # troubles: flags of the run, source that runs before it
    "updates_fail": (
        "--optimizer=sgd --peak_lr=1e30 --grad_clip=0 --max_steps=40 --max_rollbacks=0",
        "",
    ),
    "clipped_always": ("--grad_clip=0.01 --max_steps=60", ""),
    "norm_is_zero": ("--max_steps=40", DEAD),
    "loss_stuck": ("--peak_lr=1e-6 --min_lr=0 --max_steps=80", ""),
    "underfitting": ("--peak_lr=3e-4 --min_lr=0 --max_steps=120", ""),
    "loss_rises": (f"{CONSTANT} --optimizer=momentum --momentum=0.99 --peak_lr=1", ""),
    "loss_spikes": (f"{CONSTANT} --optimizer=sgd --peak_lr=0.5 --seed=4", ""),
    "plateau": (
        "--schedule=step --step_size=60 --gamma=1e-6 --min_lr=0 --peak_lr=1e-2 --max_steps=240",
        "",
    ),
    "overfitting": (
        "--dataset=small --n_embd=64 --peak_lr=1e-2 --max_steps=240 --eval_interval=30",
        "",
    ),
    "out_of_memory": ("--max_steps=20", FULL),
    "memory_grows": ("--max_steps=60", KEEPS),
    "throughput_falls": ("--max_steps=60", slow("train_step", 10)),
    "waits_for_data": ("--max_steps=60", slow("ShuffledWindows.__getitem__", 10)),
}
CONFIGS = sorted(path.stem for path in REPO.glob("config/*.py"))
# A config as far as a test has time for: its rates, its optimizer and its schedule, a model that is
# small.
SHORT = "--dataset=manual --n_layer=1 --n_embd=64 --n_head=2 --block_size=32 --batch_size=16 --max_steps=80"
SHORT += " --accum_steps=1 --num_workers=0 --eval_interval=40 --audit_interval=0 --compile=false"


def names_of(run):
    with np.errstate(all="ignore"):
        return [found.name for found in troubles(run)]


@pytest.fixture(scope="session")
def manual(data_dir):
    """The dataset `manual`: 200,000 characters of Python's own documentation."""
    make_dataset(data_dir, "manual", pydoc_text()[:200_000])


@pytest.fixture
def run_of(manual, run_train, tmp_path):
    """run_of(name, flags, before) -> the folder of a real run."""

    def run(name, flags, before=""):
        common = "--dataset=manual --log_interval=5 --eval_tokens=2000 --eval_interval=60"
        folder = f"--out_dir={tmp_path / name}"  # last, as a config file has one of its own
        done = run_train(name, *common.split(), *flags.split(), folder, before=before, code=None)
        return done.out_dir

    return run


def on_a_quiet_machine(folder):
    """The Run in `folder`, as if the machine had done nothing else meanwhile."""
    run = read_run(folder)
    for name, value in SPEED.items():
        run.train[name] = np.full(len(run.train["step"]), value)
    return run


@pytest.mark.parametrize("name", REAL)
def test_a_real_run_that_has_the_trouble_is_told_so(name, run_of):
    flags, before = REAL[name]
    assert name in names_of(read_run(run_of("run", flags, before)))


def test_a_run_that_diverges_after_its_resume_is_told_so_with_the_jump_of_the_rate(run_of):
    flags = "--schedule=constant --peak_lr=1e-2 --warmup_steps=5 --max_steps="
    good = on_a_quiet_machine(run_of("run", flags + "60"))
    assert names_of(good) == []
    calm = on_a_quiet_machine(run_of("run", flags + "90"))
    assert [row["event"] for row in calm.events].count("resume") == 1
    assert "diverges_after_resume" not in names_of(calm)
    jumped = read_run(run_of("run", flags.replace("1e-2", "3") + "150"))
    (found,) = [each for each in troubles(jumped) if each.name == "diverges_after_resume"]
    assert "resumed at step 90" in found.shows and "from 0.01 to 3" in found.shows


@pytest.mark.parametrize("config", first(2, CONFIGS))
def test_a_config_shortened_is_told_of_no_trouble(config, run_of):
    assert names_of(on_a_quiet_machine(run_of("run", f"config/{config}.py {SHORT}"))) == []


def test_every_trouble_is_tried_on_a_run_that_has_it():
    assert set(texts()) == {*REAL, "diverges_after_resume"}


# ---- advice --------------------------------------------------------------------------------------


def rising():
    """Rows whose loss falls and then jumps back to where it began."""
    again = [row | {"step": 100 + row["step"]} for row in falling(100)[:20]]
    return falling(100) + again


def finding(tmp_path, rows, name, **info):
    with np.errstate(all="ignore"):
        found = troubles(read_run(write_run(tmp_path, rows, **info)))
    return next(each for each in found if each.name == name)


def test_the_command_for_a_step_starts_what_trained_the_run(tmp_path):
    flags = f"replay.py {tmp_path / 'run'} --step="
    info = {"command": ["train.py", "config/mine.py"]}
    look = finding(tmp_path / "run", rising(), "loss_spikes", **info).look
    assert look.startswith(f"python {flags}")
    info = {"command": ["examples/images.py"], "hardware": {"world_size": 2}}
    look = finding(tmp_path / "run", rising(), "loss_spikes", **info).look
    assert look.startswith(f"torchrun --standalone --nproc_per_node=2 {flags}")
    assert look.endswith(" --script=examples/images.py")


def test_every_trouble_has_a_detector_and_a_section_that_says_all_of_it():
    defined = {name for name, each in vars(detectors).items() if callable(each)}
    assert set(texts()) <= defined
    for about in texts().values():
        assert {"title", "Symptoms", "Causes", "Diagnosis", "Cure"} == about.keys()
        assert all("\n" not in text and "](" not in text for text in about.values())


# ---- the command that shows the step -------------------------------------------------------------


def replays_in(folder):
    """The commands for replay.py in report.md, each once, in its order."""
    commands = re.findall("`([^`]*replay.py [^`]*)`", (folder / "report.md").read_text())
    return [shlex.split(each) for each in dict.fromkeys(commands)]


def test_the_report_leads_to_skipped_updates_and_rollbacks(run_train):
    flags = ("--save_interval=4", "--max_skipped=2", "--log_interval=1", "--report=true")
    done = run_train("run", *flags, before=bad_batches([8, 9]))
    first, last = ([f"--step={n}", "--before_rollback=1"] for n in (9, 10))
    assert [command[3:] for command in replays_in(done.out_dir)] == [first, last]
    assert "Look into that step" in (done.out_dir / "report.md").read_text()
