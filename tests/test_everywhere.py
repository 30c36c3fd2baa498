"""Promises that hold wherever a run may be: on several ranks, or on a device that nobody had."""

import re
from pathlib import Path

import pytest
import torch
from conftest import REPO, SHARD, codes, first, ranks
from torch.distributed.fsdp import FSDPModule

from plumbing import machine

# ---- a weight that a rank's own rows do not use --------------------------------------------------

# A vector that is added to sequences which begin with one letter, and one that is added to none.
# The rows of a rank, or all rows of a step, may lack that letter: then the vector has no gradient
# there.
EXPERT = """
import os, torch
def build_model(*args, inner=train.build_model):
    model = inner(*args)
    model.expert = torch.nn.Parameter(torch.zeros(model.config.n_embd))
    model.never = torch.nn.Parameter(torch.ones(model.config.n_embd))
    def add(module, inputs, x):
        chosen = inputs[0][:, :1, None] == 46
        if not chosen.any():
            return x
        if torch.is_grad_enabled():
            os.write(1, f"USED {int(os.environ.get('RANK', 0))}\\n".encode())
        return x + model.expert * chosen
    model.embedding.register_forward_hook(add)
    return model
train.build_model = build_model
"""


def test_a_weight_that_only_some_ranks_use_learns_as_with_one_process(run_train):
    flags = ("--log_interval=1", "--max_steps=30")
    alone = run_train("alone", *flags, "--batch_size=8", before=EXPERT)
    two = run_train("two", *flags, "--batch_size=4", before=ranks(2, EXPERT))
    assert codes(two) == "0 0", two.stderr
    used = [re.findall(f"USED {rank}", two.stdout) for rank in (0, 1)]
    assert 0 < len(used[0]) < 30 and 0 < len(used[1]) < 30, used
    losses = [[row["loss"] for row in done.rows("train")] for done in (alone, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    saved = [torch.load(done.checkpoint(30), weights_only=True) for done in (alone, two)]

    a, b = (each["model"] for each in saved)
    assert a["expert"].abs().max() > 1e-3
    assert torch.allclose(a["expert"], b["expert"], atol=1e-5)
    assert torch.equal(b["never"], torch.ones_like(b["never"]))


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"),
    reason="torch 2.11: FSDP2 needs a gradient of each weight on every rank",
)
def test_a_sharded_model_may_leave_weights_unused_on_some_ranks(run_train):
    """Without zeros in their place the ranks would exchange shares of different lengths."""
    flags = ("--log_interval=1", "--batch_size=4", "--max_steps=6")
    plain = run_train("plain", *flags, before=ranks(2, EXPERT))
    sharded = run_train("sharded", *flags, SHARD, before=ranks(2, EXPERT))
    assert codes(sharded) == "0 0", sharded.stderr
    used = [len(re.findall(f"USED {rank}", sharded.stdout)) for rank in (0, 1)]
    assert 0 < sum(used) < 12, used
    losses = [[row["loss"] for row in done.rows("train")] for done in (plain, sharded)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


# ---- how much a rank reads and holds -------------------------------------------------------------

PEAK = """
import itertools, os
def peak_of(compute):  # (bytes of tensors that it makes and that live at once, at most; its result)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profiler:
        result = compute()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(nbytes for _, nbytes in changes)), result
"""
READING = """
from pathlib import Path
def read_so_far():
    return int(Path("/proc/self/io").read_text().split()[1])
def put_back(self, inner=train.checkpoint.WholeState.put_back):
    os.write(1, f"TOOK {rank} {peak_of(lambda: inner(self))[0]}\\n".encode())
train.checkpoint.WholeState.put_back = put_back
def loop(*args, inner=train.train):
    os.write(1, f"READ {rank} {read_so_far() - began}\\n".encode())
    return inner(*args)
train.train = loop
began = read_so_far()
"""


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("shard", first(1, [SHARD, "--shard=false"]))
def test_a_checkpoint_is_read_once_by_rank_0_and_mapped_by_all(run_train, shard):
    """Rank 0 reads it to compare checksums. Of the mapping a rank takes what it keeps."""
    flags = ("--n_embd=384", "--n_head=4", "--batch_size=4", "--warmup_steps=0", shard)
    begun = run_train("run", *flags, "--max_steps=2", before=ranks(2))
    assert codes(begun) == "0 0", begun.stderr
    size = begun.checkpoint(2).stat().st_size
    assert size > 20e6
    more = ("--max_steps=3", "--decay_steps=3")
    resumed = run_train("run", *flags, *more, before=ranks(2, PEAK + READING))
    assert codes(resumed) == "0 0", resumed.stderr
    read = [int(re.search(rf"READ {rank} (\d+)", resumed.stdout)[1]) / size for rank in (0, 1)]
    # besides, rank 0 reads the metadata of each installed package
    assert 1 <= read[0] < 1.7 and read[1] < 0.1, read
    took = [int(re.search(rf"TOOK {rank} (\d+)", resumed.stdout)[1]) / size for rank in (0, 1)]
    print("read, took", read, took)
    # two thirds of a checkpoint are moments, which are new memory; the weights are there already
    assert max(took) < (0.45 if shard == SHARD else 0.8), took


def test_only_cuda_copies_in_the_background():
    """On MPS it would copy from memory that is free (pytorch#189690)."""
    kinds = {
        kind: machine.copies_in_background(torch.device(kind)) for kind in ("cuda", "mps", "cpu")
    }
    assert kinds == {"cuda": True, "mps": False, "cpu": False}
    for path in [*REPO.glob("*.py"), *REPO.glob("*/*.py")]:
        if path.parent.name != "tests":
            for asked in re.findall(r"non_blocking=(.*)", path.read_text()):
                assert "copies_in_background(" in asked or "only CUDA" in asked, path
