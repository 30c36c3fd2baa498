"""What a failed or repeated computation moved is put back whole: gradients, buffers, random
numbers."""

import random

import numpy as np
import torch

import train
from plumbing.cli import RunFailed
from plumbing.safe_step import explain, out_of_memory, rng_state, set_rng_state

CPU = torch.device("cpu")

# ---- random numbers ------------------------------------------------------------------------------


def draw():
    """Random numbers of every kind. Generators of normal ones keep a second one for later."""
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


def test_what_ended_a_run_is_explained_in_one_line():
    assert all(map(out_of_memory, WORDS.values()))
    assert not out_of_memory(ValueError("out of memory"))
    failed = RunFailed("what helps: a lower --peak_lr")
    assert explain(failed) is failed
    failed.args = (f"Caught RunFailed in a worker.\n...\nplumbing.cli.RunFailed: {failed}\n",)
    assert str(explain(failed)) == "what helps: a lower --peak_lr"
    assert "--n_embd" in str(explain(MemoryError()))
    assert explain(TypeError("unsupported operand")) is None  # the program's own: a traceback
