"""What several ranks do together, on two processes: sums, agreements, leaving, sharded modules.

The tests of whole runs on several ranks are in test_ranks.py. The two processes import this
file."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import sources
import torch
from torch import nn

from plumbing import fsdp, ranks
from plumbing.safe_step import Captured, halving_on_oom

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def found(once):
    """What rank 0 and rank 1 found out in work_together(), each a process."""
    tests = str(Path(__file__).parent)
    work = f"import sys; sys.path.insert(0, {tests!r})\n"
    work += "import test_group; train.main = test_group.main\n"
    lines = once(before=work + sources.ranks(2)).stdout.splitlines()
    lines = sorted(line for line in lines if line.startswith("FOUND "))
    return [json.loads(line.split(" ", 2)[2]) for line in lines]


# ---- what each rank runs -------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Linear(6, 6, bias=False)

    def forward(self, x, table):
        self.seen = [str(x.dtype), str(table.dtype), str(self.matrix.weight.dtype)]
        return self.matrix(x) * table


class Gain(Block):
    """A block that holds more than matrices."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)

    def forward(self, x, table):
        return super().forward(self.norm(x), table)


class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.table = nn.Buffer(torch.ones(6), persistent=False)
        self.blocks = nn.ModuleList([block()])
        self.head = nn.Linear(6, 5)  # its 5 rows do not divide by 2

    def forward(self, x):
        return self.head(self.blocks[0](x, self.table))


def main():
    found = json.dumps(work_together())
    os.write(1, f"FOUND {os.environ['RANK']} {found}\n".encode())
    return 0


def work_together():
    found = {}
    with ranks.joined(CPU, hang_minutes=1):
        me = ranks.rank()
        mixed = [torch.full((3,), 1.5 + me), torch.tensor([me + 1]), torch.tensor(0.25).double()]
        ranks.sum_over_ranks(mixed)
        found["sums"] = [[str(t.dtype), t.tolist()] for t in mixed]

        found["sharded"] = {each.__name__: sharded_model(each) for each in (Block, Gain)}
        found["plain"] = plain_module()
        found["memory"] = memory_runs_out_on_rank_1()
    return found


def sharded_model(block):
    """One backward pass of a sharded model; is shard_like(weight, value) torch's own?"""
    from torch.distributed.tensor import distribute_tensor

    torch.manual_seed(1)
    model = Model(block)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    fsdp.shard(model, CPU, "bfloat16", offload=False)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(4, 6)).sum().backward()
    exact = []
    for name, weight in model.named_parameters():
        here = fsdp.shard_like(weight, before[name])
        place = (weight.device_mesh, weight.placements)
        theirs = distribute_tensor(before[name], *place, src_data_rank=None)
        exact.append(torch.equal(ranks.local(here), ranks.local(theirs)))
        exact.append(torch.equal(ranks.whole(here), before[name]))
        exact.append(torch.equal(ranks.whole(weight), before[name]))
    half = torch.zeros(5, 6, dtype=torch.float16)
    return {
        "exact": all(exact),
        "rows": len(ranks.local(model.head.weight)),
        "dtypes": model.blocks[0].seen,
        "sharded": ranks.is_sharded(model),
        "keeps its dtype": str(fsdp.shard_like(model.head.weight, half).dtype),
        "other shape": fsdp.shard_like(model.head.weight, torch.zeros(())).tolist(),
    }


def plain_module():
    """A module without blocks is sharded as one piece."""
    model = fsdp.shard(nn.Linear(6, 5), CPU, "bfloat16", offload=True)
    model(torch.ones(2, 6)).sum().backward()
    return ranks.whole(model.weight.grad).tolist() == [[4.0] * 6] * 5  # summed over 2 x 2 rows


def memory_runs_out_on_rank_1():
    """The rows that both ranks end up with, and what a retry found."""
    model = nn.BatchNorm1d(2)
    run = SimpleNamespace(model=model, device=CPU, state={"micro_batch": 4})
    tries = []

    def compute():
        tries.append([torch.rand(1).item(), model.running_mean.tolist(), model.weight.grad is None])
        model(torch.rand(run.state["micro_batch"], 2)).sum().backward()
        if ranks.rank() == 1 and run.state["micro_batch"] > 2:
            raise MemoryError
        return run.state["micro_batch"]

    rows = halving_on_oom(Captured(run), "micro_batch", compute)
    return {"rows": rows, "tries": tries}


# ---- what they must find -------------------------------------------------------------------------


def test_tensors_of_any_dtype_are_summed_in_place(found):
    sums = [["torch.float32", [4.0] * 3], ["torch.int64", [3]], ["torch.float64", 0.5]]
    assert [each["sums"] for each in found] == [sums, sums]


def test_any_changed_bit_changes_the_checksum():
    tensor = torch.linspace(-1, 1, 1000)
    before = ranks.checksum(tensor)
    for bit in range(32):
        changed = tensor.clone()
        changed.view(torch.int32)[bit * 31] ^= 1 << bit if bit < 31 else -(1 << 31)
        assert ranks.checksum(changed) != before
    assert ranks.checksum(-tensor) != before  # an even number of equal changes
    assert ranks.checksum(tensor.flip(0)) != before
    assert ranks.checksum(tensor.clone()) == before
    transposed = tensor.view(10, 100).t().contiguous().t()
    assert ranks.checksum(transposed) == before  # strides are no bits


def test_any_module_can_be_sharded_and_gets_its_own_rows_of_what_is_restored(found):
    """What comes into a block keeps its precision: rotary tables, say, or a LayerNorm's gain."""
    for each, rows in zip(found, (3, 2), strict=True):
        for model in each["sharded"].values():
            assert model["exact"] and model["sharded"] and model["rows"] == rows
            assert model["keeps its dtype"] == "torch.float16" and model["other shape"] == 0
        assert each["sharded"]["Block"]["dtypes"] == ["torch.float32"] * 2 + ["torch.bfloat16"]
        assert each["sharded"]["Gain"]["dtypes"] == ["torch.float32"] * 3
        assert each["plain"]


def test_where_memory_runs_out_on_one_rank_all_repeat_the_same_batch_in_halves(found):
    for each in found:
        memory = each["memory"]
        assert memory["rows"] == 2
        first, second = memory["tries"]
        assert first == second and second[1:] == [[0.0, 0.0], True]
