"""Which kernels computed, and the mode in which all x86-64 CPUs compute the same bits."""

import os
import subprocess
import sys

import pytest
import torch
from conftest import REPO

from plumbing import machine

CPU = torch.device("cpu")
OPTIMIZERS = ("adamw", "adam", "sgd", "momentum", "muon")
needs_avx512_bf16 = pytest.mark.skipif(
    "ONEDNN_MAX_CPU_ISA" in os.environ or "avx512_bf16" not in machine.cpu_info()[1],
    reason="needs a CPU with AVX512-BF16, whose kernels are not restricted",
)


def python(source, **env):
    """What a new process prints."""
    command = [sys.executable, "-c", source]
    env = os.environ | env
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ---- kernel_bits ---------------------------------------------------------------------------------

PRINT_BITS = """
import torch
from plumbing.machine import kernel_bits
print(*(kernel_bits(torch.device("cpu"), *how.split()) for how in {how!r}))
"""


@needs_avx512_bf16
@pytest.mark.parametrize(
    "variable, value, differ",
    [
        ("ATEN_CPU_CAPABILITY", "avx2", ["float32 adamw", "float32 sgd", "bfloat16 adamw"]),
        ("ONEDNN_MAX_CPU_ISA", "AVX2", ["float32 muon", "bfloat16 adamw"]),
        ("MKL_CBWR", "COMPATIBLE", ["float32 adamw", "float32 muon"]),
    ],
)
def test_other_kernels_have_other_bits(variable, value, differ):
    """So that a run whose CPU has other units than its name tells is not taken for the same run. Of
    these three, the hash of one matrix product tells only the second."""
    here = python(PRINT_BITS.format(how=differ)).split()
    there = python(PRINT_BITS.format(how=differ), **{variable: value}).split()
    assert all(len(bits) == 16 for bits in here)
    assert not set(here) & set(there)


def test_kernel_bits_are_the_same_twice_and_leave_the_random_state_alone():
    before = torch.get_rng_state()
    bits = {
        (dtype, name): machine.kernel_bits(CPU, dtype, name)
        for dtype in ("float32", "bfloat16")
        for name in OPTIMIZERS
    }
    assert len(set(bits.values())) == len(bits)
    assert all(machine.kernel_bits(CPU, *how) == bits[how] for how in bits)
    assert torch.equal(before, torch.get_rng_state())


def test_kernel_bits_do_not_depend_on_the_users_code():
    """A fork's model or optimizer is other code, which the identity tells apart from other kernels."""
    loaded = "import sys; print({'model', 'optim', 'train'} & sys.modules.keys())"
    assert python(PRINT_BITS.format(how=["float32 muon"]) + loaded).endswith("set()")
