"""Every random number that comes after a checkpoint is the one that would have come without it."""

import random

import numpy as np
import torch

from plumbing import rng

CPU = torch.device("cpu")


def draw():
    """Some random numbers of every kind. Normal ones: their generators keep a second one for later."""
    normal = [random.gauss(0, 1), float(np.random.normal()), torch.randn(1).item()]
    return [random.random(), float(np.random.rand()), torch.rand(1).item(), *normal]


def test_the_state_of_every_generator_survives_a_weights_only_file(tmp_path):
    rng.seed_everything(2**32 + 5)
    draw()
    torch.save(rng.rng_state(CPU), tmp_path / "rng.pt")
    expected = [draw(), draw()]
    assert expected[0] != expected[1]
    rng.set_rng_state(torch.load(tmp_path / "rng.pt", weights_only=True), CPU)
    assert [draw(), draw()] == expected


def test_the_same_seed_gives_the_same_numbers():
    rng.seed_everything(7)
    first = draw()
    rng.seed_everything(8)
    assert draw() != first
    rng.seed_everything(7)
    assert draw() == first


def test_a_state_from_a_gpu_can_be_set_on_a_cpu():
    """A run that moves from a GPU to a CPU resumes inexactly, but resumes."""
    saved = rng.rng_state(CPU) | {"device": torch.zeros(16, dtype=torch.uint8)}
    expected = torch.rand(3).tolist()
    rng.set_rng_state(saved, CPU)
    assert torch.rand(3).tolist() == expected


def test_torch_alone_can_be_put_back():
    before = rng.torch_rng_state(CPU)
    expected = torch.rand(3).tolist()
    rng.set_torch_rng_state(before, CPU)
    assert torch.rand(3).tolist() == expected
