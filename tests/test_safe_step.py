"""What a failed or repeated computation moved is put back whole: gradients, buffers, random
numbers."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import train
from plumbing.cli import RunFailed
from plumbing.safe_step import (
    Captured,
    explain,
    halving_on_oom,
    out_of_memory,
    rng_state,
    set_rng_state,
)

CPU = torch.device("cpu")

# ---- nested containers ---------------------------------------------------------------------------


# ---- random numbers ------------------------------------------------------------------------------


def draw():
    """Some random numbers of every kind. Normal ones: their generators keep a second one for
    later."""
    normal = [random.gauss(0, 1), float(np.random.normal()), torch.randn(1).item()]
    return [random.random(), float(np.random.rand()), torch.rand(1).item(), *normal]


def test_the_state_of_every_generator_survives_a_weights_only_file(tmp_path):
    train.seed_everything(2**32 + 5)
    first = draw()
    torch.save(rng_state(CPU), tmp_path / "rng.pt")
    expected = [draw(), draw()]
    assert expected[0] != expected[1]
    set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True), CPU)
    assert [draw(), draw()] == expected
    train.seed_everything(8)
    assert draw() != first
    train.seed_everything(2**32 + 5)
    assert draw() == first


def test_a_state_from_a_gpu_can_be_set_on_a_cpu():
    """A run that moves from a GPU to a CPU resumes inexactly, but resumes."""
    saved = rng_state(CPU) | {"device": torch.zeros(16, dtype=torch.uint8)}
    expected = draw()
    set_rng_state(saved, CPU)
    assert draw() == expected


# ---- evaluation ----------------------------------------------------------------------------------


# ---- a skipped update ----------------------------------------------------------------------------


# ---- out of memory -------------------------------------------------------------------------------

WORDS = {  # of torch's allocators
    "cpu": RuntimeError(
        "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"
    ),
    "mps": RuntimeError("MPS backend out of memory (MPS allocated: 9.00 GB)"),
    "cuda": torch.OutOfMemoryError("CUDA out of memory."),
    "python": MemoryError(),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    "cudnn": RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
}


class Job:
    """A run whose forward pass (dropout, batch norm) fits only micro-batches of up to `room`
    rows."""

    def __init__(self, room, micro_batch=8, error=WORDS["cpu"]):
        self.room = room
        self.error = error
        self.device = torch.device("cpu")
        self.model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(3))
        self.state = {"step": 4, "micro_batch": micro_batch, "eval_micro_batch": 8}
        self.noted_sizes = dict(self.state)
        self.folder = SimpleNamespace(event=self.event)
        self.events = []
        self.seen = []

    def event(self, step, name, **fields):
        self.events.append((step, name, fields))

    def compute(self):
        """A pass over 8 rows; what it draws and moves before memory runs out must not count."""
        self.seen.append((self.model[1].running_mean.tolist(), torch.get_rng_state().sum().item()))
        total = 0.0
        for rows in torch.ones(8, 3, 2).split(self.state["micro_batch"]):
            loss = self.model(rows).square().mean()
            loss.backward()
            total += loss.item()
            if self.state["micro_batch"] > self.room:
                raise self.error
        return total


@pytest.mark.parametrize(
    "error, raised, words, tries",
    [
        (WORDS["cpu"], RunFailed, "a single sequence.*--grad_checkpoint=true", 4),
        (RuntimeError("mat1 and mat2 shapes cannot be"), RuntimeError, "mat1", 1),
    ],
    ids=["a single row does not fit", "another error"],
)
def test_what_no_retry_helps_ends_the_run(error, raised, words, tries):
    job = Job(room=0, error=error)
    with pytest.raises(raised, match=words):
        halving_on_oom(Captured(job), "micro_batch", job.compute)
    assert len(job.seen) == tries and job.state["micro_batch"] == 8 // 2 ** (tries - 1)


def test_what_ended_a_run_is_explained_in_one_line():
    assert all(map(out_of_memory, WORDS.values()))
    assert not out_of_memory(ValueError("out of memory"))
    failed = RunFailed("what helps: a lower --peak_lr")
    assert explain(failed) is failed
    assert "--n_embd" in str(explain(MemoryError()))
    assert explain(TypeError("unsupported operand")) is None  # the program's own: a traceback
