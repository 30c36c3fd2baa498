"""Checkpoint files: in which order they get their names, and what is refused instead of read."""

import os

import torch
from sources import around

SAVES = ("--save_interval=2", "--eval_interval=2", "--milestone_interval=4")
KILL_AT_4 = """
def link(source, name, inner=os.link):
    if source.name.endswith("_00000004.pt"):
        os.kill(os.getpid(), 9)
    inner(source, name)
os.link = link
"""


def test_a_kill_between_the_names_of_a_save_loses_none_of_them(run_train):
    straight = run_train("straight", *SAVES)
    killed = run_train("run", *SAVES, before=KILL_AT_4, code=137)
    assert not killed.checkpoint(4).exists()
    done = run_train("run", *SAVES)
    names = {path.name for path in straight.out_dir.glob("*.pt")}
    assert {path.name for path in done.out_dir.glob("*.pt")} == names
    assert "milestone_00000004.pt" in names
    best = [torch.load(each.out_dir / "best.pt")["state"]["step"] for each in (straight, done)]
    assert best[0] == best[1]


def test_what_is_no_regular_file_is_refused_in_one_line(run_train):
    flags = ("--save_interval=4",)
    done = run_train("run", *flags)
    for name in ("run.json", ".lock"):
        kept = done.out_dir / f"{name}.kept"
        os.rename(done.out_dir / name, kept)
        os.mkfifo(done.out_dir / name)
        refused = run_train("run", *flags, code=2)
        assert len(refused.stderr.splitlines()) == 1, refused.stderr
        os.replace(kept, done.out_dir / name)
    for name in ("ckpt_00000012.pt", "best.pt"):
        os.remove(done.out_dir / name)
        os.mkfifo(done.out_dir / name)
    resumed = run_train("run", *flags)
    assert "it is no regular file" in resumed.stdout, resumed.stderr
    assert (done.out_dir / "ckpt_00000012.pt.corrupt").exists()
    assert (done.out_dir / "ckpt_00000012.pt").is_file()


LORA = """
result.requires_grad_(False)
result.adapter = torch.nn.Parameter(torch.zeros(3))
result.head.requires_grad_(True)
"""


def test_weights_that_a_checkpoint_lacks_are_named_with_what_to_do(run_train):
    base = run_train("base", "--peak_lr=1e-2")
    best = base.out_dir / "best.pt"
    refused = run_train("new", f"--resume={best}", before=around("build_model", then=LORA), code=2)
    assert len(refused.stderr.splitlines()) == 1, refused.stderr
    assert "best.pt lacks 1 weights of this model, such as adapter" in refused.stderr
    assert "load them in build_model" in refused.stderr and not refused.out_dir.exists()
    load = f"result.load_state_dict(torch.load({str(best)!r}, weights_only=True)['model'])"
    done = run_train("new", before=around("build_model", then=load + LORA))
    assert done.rows("eval")[0]["val_loss"] == base.rows("eval")[-1]["val_loss"]
