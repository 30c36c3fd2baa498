"""The device, its precision and its peak are chosen by what it is: the same way every time, and
fast."""

import math
import os

import pytest
import torch
from helpers import python

from plumbing import machine

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)  # its name, which needs no GPU
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


# ---- the device ----------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_gpu
def test_the_gpu_is_found_by_default():
    """torch.cuda.set_device does not take a device without a number."""
    assert "cuda:0" in python("from plumbing.machine import *; print(choose_device('auto'))")


# ---- precision, compilation, determinism ---------------------------------------------------------


def test_bfloat16_is_the_default_only_where_the_cpu_computes_in_it(monkeypatch):
    for flag, expected in (
        ("amx_bf16", "bfloat16"),
        ("avx512_bf16", "bfloat16"),
        ("avx2", "float32"),
    ):
        monkeypatch.setattr(machine, "cpu_info", lambda flag=flag: ("a CPU", {flag}))
        assert machine.choose_dtype("auto", CPU)[0] == expected
        assert machine.choose_dtype("bfloat16", CPU) == ("bfloat16", "as given")


def test_compile_auto_on_a_cpu_is_decided_by_flops_alone():
    assert machine.choose_compile("auto", CPU, 5e13, 1000)[0]
    assert not machine.choose_compile("auto", CPU, 4.9e13, 1000)[0]
    assert not machine.choose_compile("auto", CPU, math.nan, 1000)[0]  # a model that cannot tell
    assert machine.choose_compile(True, CPU, math.nan, 1000)[0]
    assert not machine.choose_compile(False, CPU, 5e13, 1000)[0]


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_compiler_chooses_no_kernel_by_timing_in_deterministic_mode(run_train, deterministic):
    probe = f"""
import torch
from torch._inductor import config
config.deterministic = {not deterministic}
def compile(model, **options):
    print("Inductor is deterministic:", config.deterministic)
    return model
torch.compile = compile
"""
    flags = ("--compile=true", f"--deterministic={deterministic}")
    done = run_train("run", *flags, before=probe)
    assert f"Inductor is deterministic: {deterministic}" in done.stdout


def test_deterministic_mode_pins_the_order_of_sums_before_nccl_starts(monkeypatch):
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    try:
        assert machine.set_deterministic("auto", GPU) is True
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert os.environ["NCCL_ALGO"] == "Ring"
        monkeypatch.setenv("NCCL_ALGO", "Tree")
        machine.set_deterministic(True, GPU)
        assert os.environ["NCCL_ALGO"] == "Tree"  # what the user has set stays
        assert machine.set_deterministic("auto", torch.device("mps")) is False
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        machine.set_deterministic(False, CPU)


# ---- the peak ------------------------------------------------------------------------------------


PEAKS = [
    ("NVIDIA A100-SXM4-80GB", "bfloat16", 312e12),
    ("A100-SXM4-40GB", "float32", 19.5e12),  # by an older driver
    ("NVIDIA H100 80GB HBM3", "float16", 989e12),
    ("NVIDIA H100 PCIe", "bfloat16", 756e12),
    ("NVIDIA L4", "bfloat16", 121e12),
    ("NVIDIA L40S", "bfloat16", 362e12),
    ("NVIDIA GeForce RTX 4090", "float32", 82.6e12),
    ("Tesla T4", "float16", 65e12),
]
UNKNOWN = ["NVIDIA L40", "NVIDIA T400 4GB", "NVIDIA H100 NVL", "NVIDIA GB200", "NVIDIA GH200 480GB"]
UNKNOWN += ["NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU", ""]


def test_a_known_gpu_has_the_peak_of_its_datasheet_and_no_other_gpu_has():
    for gpu, dtype, peak in PEAKS:
        assert machine.datasheet_peak(gpu, dtype) == peak, gpu
    for gpu in UNKNOWN:
        peaks = [machine.datasheet_peak(gpu, d) for d in ("bfloat16", "float16", "float32")]
        assert peaks == [None] * 3, gpu


def test_a_busy_machine_has_no_peak(monkeypatch):
    """Half of the repeats, or all of the larger size, are slower by more than a quarter."""
    for slow, is_known in (([1.2] * 10, True), ([1.0] * 8 + [9.0] * 2, True), ([1.3] * 10, False)):
        times = iter([[0.002] * 10, [8 * 0.002 * each for each in slow]])
        monkeypatch.setattr(machine.timeit, "repeat", lambda *_, times=times, **__: next(times))
        rate, _ = machine.matmul_rate(CPU, torch.float32, sizes=(32, 64))
        assert math.isnan(rate) != is_known
        assert not is_known or rate == 2 * 32**3 / 0.002 or rate == 2 * 64**3 / 0.016


@pytest.mark.parametrize("peak", [1.0, math.nan])
def test_a_peak_that_a_step_exceeds_is_none_and_the_achieved_rate_stays(run_train, peak):
    before = f"train.machine.peak_flops = lambda *_: (float('{peak}'), 'as it says')"
    done = run_train("run", before=before)
    assert {row["mfu"] for row in done.rows("train")} == {None}
    assert done.facts["flops_per_token"] > 0
    assert ("peak     n/a" in done.stdout) == math.isnan(peak)
