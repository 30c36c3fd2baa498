"""What forks do to the loop: each script of docs/forks.md, and small changes as people make them.

A change is source that a run executes before train.main(): see sources.py."""

import ast
import functools
import shutil

import numpy as np
import pytest
import torch
from conftest import SCRIPTS, fingerprint
from sources import loading, stop_at
from torch.nn import functional as F

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


def test_the_folder_of_a_script_is_not_resumed_by_another_or_without_it(run_script, run_train):
    run_script("run", "penalty.py", before=stop_at(7), code=143)
    done = run_train("run", *FLAGS, code=2)
    assert "another run: script penalty.py -> train.py" in done.stderr
    done = run_script("run", "growing.py", code=2)
    assert "another run: script penalty.py -> growing.py" in done.stderr


def test_without_locks_a_run_says_so_and_goes_on(run_train):
    no_locks = """
def lockf(*args):
    raise OSError(37, "No locks available")
plumbing.fcntl.lockf = lockf
"""
    done = run_train("run", before=no_locks)
    assert "cannot be locked (No locks available): start no second run in it" in done.stdout
