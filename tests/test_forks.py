"""What forks do to the loop: each script of docs/forks.md, and small changes as people make them.

A change is source that a run executes before train.main(): see sources.py."""

import ast
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import run_page
import torch
from conftest import REPO, TINY, fingerprint, make_dataset, pydoc_text, rows
from sources import WAIT_FOR_SAVE, around, stop_at
from torch.nn import functional as F

import plumbing
import train

PAGE = REPO / "docs/forks.md"
SCRIPTS = run_page.scripts(PAGE)
FLAGS = "--save_interval=4 --eval_interval=5 --keep_last=9 --log_interval=1".split()
MORE = {  # flags that bring what a script does into twelve steps
    "growing.py": ("--growth=8",),
    "unfreeze.py": ("--unfreeze_at=6",),
    "picture.py": ("--wandb_log=true",),
}
QUICK = ("f1.py", "gan.py", "growing.py", "unfreeze.py")  # they bring all that a fork may replace
TRAINED = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name, code in SCRIPTS.items()
    if "\n    train.main()\n" in code
]


# ---- the scripts of the page ---------------------------------------------------------------------


@pytest.fixture(scope="session")
def page(tmp_path_factory, train_in, data_dir):
    """A folder with the scripts of the page, and with what they read."""
    folder = tmp_path_factory.mktemp("page")
    for name, code in SCRIPTS.items():
        (folder / name).write_text(code)
    (csv,) = [code for *_, code in run_page.blocks(PAGE) if "savetxt" in code]
    subprocess.run(["bash", "-c", csv], cwd=folder, check=True)
    make_dataset(data_dir, "code", pydoc_text()[:20_000], "byte")
    make_dataset(data_dir, "words", pydoc_text()[-9000:], "byte")
    train_in(folder, "out/base", "--max_steps=6")
    return folder


def loading(path):
    """Source that makes the script at `path` that of the run."""
    words = f"import pathlib, sys; sys.path.insert(0, {str(path.parent)!r})"
    return f"{words}\nplumbing.script = pathlib.Path({str(path)!r})\nimport {path.stem}\n"


@pytest.fixture
def run_script(run_train, page, tmp_path):
    """run_script(out_dir, name, *flags, ...) -> Done: a run of a script of the page, where that is."""

    def run(out_dir, name, *flags, before="", **how):
        flags, before = (*FLAGS, *MORE.get(name, ()), *flags), loading(page / name) + before
        return run_train(tmp_path / out_dir, *flags, before=before, cwd=page, **how)

    return run


@pytest.mark.parametrize("name", TRAINED)
def test_a_script_of_the_page_is_killed_and_resumes_bit_for_bit(name, run_script):
    run = functools.partial(run_script, env={"WANDB_MODE": "offline", "WANDB_SILENT": "true"})
    straight = run("straight", name)
    run("run", name, before=stop_at(7, "SIGKILL"), code=137)
    run("run", name, before=stop_at(10), code=143)
    done = run("run", name)
    assert done.fingerprint() == straight.fingerprint()
    assert fingerprint(done.out_dir / "best.pt") == fingerprint(straight.out_dir / "best.pt")
    assert done.rows() == straight.rows()
    assert [row["first_difference"] for row in done.events("resume_checked")] == [None, None]
    losses = [row["val_loss"] for row in done.rows("eval")]
    assert losses[-1] < losses[0], "it must have learned for this to mean much"
    has_text = "tokenizer" in done.facts["data"]["meta"]
    assert has_text == done.stdout.endswith(f"{name}\n"), "sample.py needs the script"


def test_best_pt_is_evaluated_on_a_test_set(run_script, run_train, page, tmp_path):
    run_script("out/f1", "f1.py")
    for name in ("rare.csv", "test.csv"):
        shutil.copy(page / name, tmp_path)
    source = f"{loading(page / 'on_test.py')}plumbing.exit_process(0)"
    printed = run_train("none", before=source).stdout
    found = ast.literal_eval(printed.splitlines()[-1])
    saved = torch.load(tmp_path / "out/f1/best.pt", weights_only=True)["model"]
    table = torch.from_numpy(np.loadtxt(page / "test.csv", np.float32, delimiter=","))
    hidden = F.gelu(F.linear(table[:, :3], saved["0.weight"], saved["0.bias"]))
    logits, y = F.linear(hidden, saved["2.weight"], saved["2.bias"]), table[:, 3].long()
    loss = F.cross_entropy(logits, y, torch.tensor([1.0, 9.0]), ignore_index=255)
    said, true = (logits.argmax(1) == 1) & (y != 255), y == 1
    f1 = 2 * (said & true).sum() / (said.sum() + true.sum())
    assert 0 < f1 < 1 and found["val_f1"] == pytest.approx(f1.item())
    assert found["val_loss"] == pytest.approx(loss.item(), rel=1e-5)


OUT_OF_MEMORY = around("forward", "if len(args[3]) > 3: raise MemoryError")
SPLITS = [  # flags, change, ranks
    (("--batch_size=8",), "", 1),
    (("--batch_size=1", "--accum_steps=8"), "", 1),  # passes in which no target counts
    (("--batch_size=3", "--accum_steps=2"), "train.sequences_at = lambda step: 8", 2),
    (("--batch_size=8",), OUT_OF_MEMORY, 1),
]


@pytest.mark.slow
def test_class_weights_and_a_metric_of_the_whole_split_are_one_number_however_split(run_script):
    whole, *others = [
        run_script(f"{number}", "f1.py", *flags, before=change, ranks=ranks)
        for number, (flags, change, ranks) in enumerate(SPLITS)
    ]
    assert others[-1].events("out_of_memory")
    for done in others:
        for row, expected in zip(done.rows(), whole.rows(), strict=True):
            names = {"loss", "grad_norm", "val_loss", "val_f1"} & {*row}
            found, right = ([each[name] for name in names] for each in (row, expected))
            assert found == pytest.approx(right, rel=1e-4)
    assert whole.rows("eval")[-1]["val_f1"] > 0


def test_a_group_keeps_the_proportion_of_its_rate(run_script):
    groups = "first, second = (group['lr'] for group in run.optimizer.param_groups)"
    ratio = around("train_step", then=f"{groups}\nresult['ratio'] = second / first")
    run_script("run", "unfreeze.py", before=ratio + stop_at(7, "SIGKILL"), code=137)
    done = run_script("run", "unfreeze.py", before=ratio)
    assert [row["ratio"] for row in done.rows("train")] == pytest.approx([0.1] * 12)
    assert len({row["lr"] for row in done.rows("train")}) > 8


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_a_stop_within_an_evaluation_of_ones_own_waits_for_one_batch(name, run_script):
    """The save that was due is on the disk."""
    kill = f"{WAIT_FOR_SAVE}\nos.kill(os.getpid(), signal.{name})"
    kill = "if run.state['step'] == 5 and args[1] == 16:\n" + textwrap.indent(kill, "    ")
    said = around("batch_at", f"print('BATCH', run.state['step'], args[1], flush=True)\n{kill}")
    code = 128 + signal.Signals[name]
    done = run_script("run", "f1.py", "--save_interval=5", before=said, code=code)
    batches = [line for line in done.stdout.splitlines() if line.startswith("BATCH 5")]
    assert batches == ["BATCH 5 0", "BATCH 5 8", "BATCH 5 16"]
    assert done.checkpoint(5).exists()
    assert [row["step"] for row in run_script("run", "f1.py").rows("eval")] == [0, 5, 10, 12]


# ---- a run that a script has ended ---------------------------------------------------------------

TARGET = """
train.knob("target", 0.0, "loss")
train.FREE.add("target")
def stop_at_target(run, row):
    if row["kind"] == "eval" and row["val_loss"] <= train.target:
        run.stop("reached the target")
train.on_row.append(stop_at_target)
"""


def test_a_run_that_has_reached_its_target_goes_on_by_force(run_train):
    """To another target; without it, it is finished, whatever the target is."""
    run_train("run", *FLAGS, "--target=9", before=TARGET)
    done = run_train("run", *FLAGS, before=TARGET)
    assert "reached the target at step 0" in done.stdout
    assert "to train longer add --resume=force" in done.stdout and not done.rows("train")
    done = run_train("run", *FLAGS, "--resume=force", before=TARGET)
    assert done.facts["ended"] == "finished" and len(done.rows("train")) == 12


def test_a_run_ends_at_the_row_of_an_evaluation_alone(run_train):
    """Ranks other than 0 see no rows, and which rows of steps are logged follows no seed."""
    stop = "train.on_row.append(lambda run, row: row['kind'] == 'train' and run.stop('low'))"
    done = run_train("run", *FLAGS, before=stop, code=1)
    assert done.stderr == (
        "train.py: run.stop(): expected at the row of an evaluation, not of a step\n"
    )


# ---- what a fork returns -------------------------------------------------------------------------

NO_RETURN = {  # what a function without `return` gives: words of the one line
    "open_dataset": "open_dataset(): found the facts None; expected name, fingerprint, meta",
    "train_step": "train_step(): found {}; expected scalars, with loss, grad_norm, skipped, targets",
    "evaluate": "evaluate(): found {}; expected scalars, with val_loss\n",
}


@pytest.mark.parametrize("name", NO_RETURN)
def test_a_function_that_returns_nothing_is_one_line(name, run_train):
    nothing = "result = (*result[:2], None)" if name == "open_dataset" else "result = None"
    done = run_train("run", *FLAGS, before=around(name, then=nothing), code=None)
    assert NO_RETURN[name] in done.stderr and len(done.stderr.splitlines()) == 1
    assert {*done.codes} == {2 if name == "open_dataset" else 1}


# ---- code ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [stop_at(7), ""])
def test_an_edit_of_the_code_is_seen_through_a_symlink_and_by_a_finished_run(
    stop, run_train, tmp_path
):
    """A comment is no edit."""
    text = (REPO / "model.py").read_text()
    (tmp_path / "model.py").write_text(text)
    (tmp_path / "link.py").symlink_to(tmp_path / "model.py")
    there = f"import model; model.__file__ = {str(tmp_path / 'link.py')!r}\n"
    run_train("run", *FLAGS, before=there + stop, code=143 if stop else 0)
    (tmp_path / "model.py").write_text(text.replace("ROPE_BASE = 10_000.0", "ROPE_BASE = 10_001.0"))
    done = run_train("run", *FLAGS, before=there, code=2)
    assert "run holds another run: model.py has changed" in done.stderr
    assert "run/code has the code so far" in done.stderr
    (tmp_path / "model.py").write_text(text + "# a comment\n")
    assert run_train("run", *FLAGS, before=there).facts["state"]["step"] == 12


def test_the_folder_of_a_script_is_not_resumed_by_another_or_without_it(run_script, run_train):
    """Though its file lies where it was."""
    run_script("run", "penalty.py", before=stop_at(7), code=143)
    done = run_train("run", *FLAGS, code=2)
    assert "another run: script penalty.py -> train.py" in done.stderr
    done = run_script("run", "growing.py", code=2)
    assert "another run: script penalty.py -> growing.py" in done.stderr


LAB = """
import train
from helpers import values


def lr_at(step, inner=train.lr_at):
    return inner(step) * values.SCALE


train.lr_at = lr_at
if __name__ == "__main__":
    train.main()
"""


@pytest.mark.slow
def test_the_command_of_a_run_gives_its_rows_in_another_clone(tmp_path, data_dir):
    """With what code/ has: the script, a package beside it, a config file, and the diff."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    for name in "train plumbing model optim prepare_data".split():
        shutil.copy(REPO / f"{name}.py", one)
    git = ["git", "-C", one, "-c", "user.name=A", "-c", "user.email=a@b.c"]
    for words in (
        ["init", "-q"],
        ["add", "."],
        ["commit", "-qm", "1"],
        ["clone", "-q", one, other],
    ):
        subprocess.run([*git, *words], check=True)
    text = (one / "model.py").read_text()
    assert "10_000.0" in text
    (one / "model.py").write_text(text.replace("10_000.0", "99.0"))
    with open(one / "plumbing.py", "a") as file:
        file.write("# edited\n")
    (one / "lab.py").write_text(LAB)
    (one / "helpers").mkdir()
    (one / "config").mkdir()
    (one / "config/mine.py").write_text("weight_decay = 0.5\n")
    (one / "helpers/values.py").write_text("SCALE = 0.5\n")
    flags = [f"--{setting}" for setting in (*TINY.split(), f"data_dir={data_dir}")]
    command = ["lab.py", "config/mine.py", *flags, "--out_dir=out/lab"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    subprocess.run([sys.executable, *command], cwd=one, env=environment, check=True)
    code, about = one / "out/lab/code", json.loads((one / "out/lab/run.json").read_text())
    assert about["command"] == command
    subprocess.run(["git", "-C", other, "apply", code / "git.diff"], check=True)
    shutil.copytree(code, other, dirs_exist_ok=True)
    subprocess.run([sys.executable, *about["command"]], cwd=other, env=environment, check=True)
    assert rows(other / "out/lab") == rows(one / "out/lab")
    for name in ("model.py", "plumbing.py"):
        assert (other / name).read_bytes() == (one / name).read_bytes()


# ---- workers, folders, messages ------------------------------------------------------------------

SERVED = """
import multiprocessing, os, train

def train_step(run, *batch_and_lr, inner=train.train_step):
    if run.state["step"] == 3 and "KILL" in os.environ:
        os.kill(os.getpid(), 9)
    return inner(run, *batch_and_lr)

train.train_step = train_step
multiprocessing.set_start_method("forkserver", force=True)
train.main()
"""


@pytest.mark.slow
def test_workers_of_a_server_end_with_a_run_that_is_killed(python_train, once, tmp_path):
    """As on Linux from Python 3.14. python_train waits until all processes are gone."""
    (tmp_path / "lab.py").write_text(SERVED)
    flags = ("--num_workers=2", "--max_steps=4")
    python_train("run", *flags, script="lab.py", env={"KILL": "1"}, code=137)
    losses = [row["loss"] for row in python_train("run", *flags, script="lab.py").rows("train")]
    expected = [row["loss"] for row in once("--max_steps=4", threads=None).rows("train")]
    assert losses == pytest.approx(expected, rel=1e-5)


def test_without_locks_a_run_says_so_and_goes_on(run_train):
    no_locks = """
def lockf(*args):
    raise OSError(37, "No locks available")
plumbing.fcntl.lockf = lockf
"""
    done = run_train("run", before=no_locks)
    assert "cannot be locked (No locks available): start no second run in it" in done.stdout


def test_the_plan_names_the_rate_of_the_last_step(run_train):
    flags = (*FLAGS, "--schedule=linear", "--decay_steps=12", "--min_lr=1e-5")
    run_train("run", *flags, before=stop_at(5), code=143)
    done = run_train("run", *flags, "--max_steps=9")
    last = done.rows("train")[-1]["lr"]
    assert f"linear 0.001 to {last:g}" in done.stdout and last > 1e-4


def test_two_checkpoints_of_one_run_begin_two_folders():
    names = []
    for step in (1, 2):
        with plumbing.configured(
            vars(train), argv=[f"--init_from=out/run/ckpt_{step}.pt"]
        ) as config:
            names.append(plumbing.folder_name(config, train.FREE, None))
    assert names == ["out/run,init_from=run-ckpt_1", "out/run,init_from=run-ckpt_2"]
