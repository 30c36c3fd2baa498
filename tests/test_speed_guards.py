"""The loop stays fast. What is bounded here are counts, which flake on no machine, not seconds.

A bound that a change breaks is a question: is it worth that? If so, raise it.
"""

import contextlib
import dataclasses
from collections import Counter

import pytest
import torch
from conftest import TINY
from helpers import python
from sources import around
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity
from torch.utils._python_dispatch import TorchDispatchMode

import model
import train
from plumbing.cli import configured

CPU = torch.device("cpu")
KINDS = [
    {},
    {"dtype": "bfloat16", "dropout": 0.1},
    {"accum_steps": 2, "batch_size": 4, "ema_decay": 0.9},
    {"optimizer": "adam"},
    {"optimizer": "momentum", "grad_clip": 0.0},
    {"optimizer": "muon"},
]


@pytest.fixture
def knobs(data_dir, tmp_path):
    """knobs(name=value, ...) sets train's globals for this test, and returns the config."""
    with contextlib.ExitStack() as stack:

        def set_knobs(**values):
            stack.close()  # of an earlier call nothing stays
            flags = TINY | {"data_dir": data_dir, "out_dir": tmp_path / "run"} | values
            argv = [f"--{name}={value}" for name, value in flags.items()]
            return stack.enter_context(configured(vars(train), argv=argv))

        yield set_knobs


class Operators(TorchDispatchMode):
    """Counts the operators that Python and autograd call. Not those that a kernel calls in turn,
    which depend on the CPU: without bfloat16 a product in it is made of twenty others."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


@dataclasses.dataclass
class Counts:
    """What one train_step does."""

    operators: int
    waits: int  # for a number on the device
    copied: int  # elements that aten::copy_ moved, also within other operators
    allocations: int  # of tensors
    parameters: int


@pytest.fixture
def counts_of(knobs):
    """counts_of(name=value, ...) -> Counts of the third and fourth step with these knobs."""

    def count(**values):
        config = knobs(**values)
        datasets = train.open_dataset(None)
        run = train.build_run(config, None, None, None, CPU, datasets)
        rows = train.rows_at(0)
        batches = [map(torch.as_tensor, datasets[0][rows * step, rows]) for step in range(4)]
        for step in range(2):
            train.train_step(run.model, run, *batches[step], 1e-3)
        with Operators() as operators:
            train.train_step(run.model, run, *batches[2], 1e-3)
        watched = {"record_shapes": True, "profile_memory": True}
        with torch.profiler.profile(activities=[ProfilerActivity.CPU], **watched) as profiler:
            train.train_step(run.model, run, *batches[3], 1e-3)
        copies = [
            torch.Size(e.input_shapes[0]) for e in profiler.events() if e.name == "aten::copy_"
        ]
        memory = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
        return Counts(
            operators=operators.calls.total(),
            waits=operators.calls["_local_scalar_dense"],
            copied=sum(shape.numel() for shape in copies),
            allocations=sum(event.nbytes() > 0 for event in memory),
            parameters=sum(weight.numel() for weight in run.model.parameters()),
        )

    return count


def test_a_step_takes_no_more_operators_and_tensors_than_it_did(counts_of):
    """Tensors in float32: how often a product in bfloat16 allocates depends on the CPU."""
    one, two = counts_of(), counts_of(n_layer=2)
    assert 150 < one.operators < 292  # 265 when this was written
    assert two.operators - one.operators < 148  # 134
    assert 50 < one.allocations < 236  # 210
    assert two.allocations - one.allocations < 88  # 79
    assert counts_of(dtype="bfloat16").operators - one.operators < 24  # 20
    assert counts_of(ema_decay=0.9).operators - one.operators < 28  # 24


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_never_copies_all_the_weights(dtype, counts_of):
    counts = counts_of(dtype=dtype, ngram_rows=8192)
    assert 0 < counts.copied < counts.parameters  # 65,817 and 128,089 of 278,720


@pytest.fixture
def take_steps(knobs, monkeypatch):
    """take_steps(name=value, ...): three steps on tensors whose numbers nobody can read."""
    monkeypatch.setattr(model.GPT, "to", lambda self, device: self)  # tensors without data stay

    def take(**values):
        config = knobs(**values)
        with FakeTensorMode():
            datasets = None, None, {"meta": {"vocab_size": 100}}
            run = train.build_run(config, None, None, None, CPU, datasets)
            tokens = torch.zeros(train.rows_at(0), 16, dtype=torch.int64)
            for _ in range(3):
                numbers = train.train_step(run.model, run, tokens, tokens, 1e-3)
        return numbers

    return take


@pytest.mark.parametrize("values", KINDS, ids=str)
def test_the_host_never_waits_for_the_device_within_a_step(values, take_steps):
    assert {value.shape for value in take_steps(**values).values()} == {()}


IN_THE_WRITER = "threading.current_thread().name == 'writer'"
COUNTED = {"train_step": "STEPS", "evaluate": "EVALUATES", "RunFolder.write_rows": "WRITES"}
COUNT_CALLS = "import threading" + around(
    "checkpoint.torch.save", f"if {IN_THE_WRITER}: print('SAVES', flush=True)"
)
for name, printed in COUNTED.items():
    COUNT_CALLS += around(name, f"print({printed!r}, flush=True)")


COMPILER = "[name for name in ('torch._dynamo', 'torch._inductor') if name in sys.modules]"


def test_a_run_that_compiles_nothing_starts_and_ends_quickly(data_dir, tmp_path):
    flags = TINY | {"data_dir": data_dir, "out_dir": tmp_path / "run", "compile": False}
    argv = [f"--{name}={value}" for name, value in flags.items()]
    at_exit = "atexit.register(lambda: print(gc.get_freeze_count() > 0, end=''))"  # runs last
    run = f"import atexit, gc, sys; {at_exit}; import train; "
    run += f"assert train.main({argv}) == 0; print({COMPILER})"
    *_, compiler, frozen = python(run).splitlines()
    assert compiler == "[]"
    assert frozen == "True"  # Python searches nothing of torch for garbage when it exits
