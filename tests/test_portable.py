"""Which kernels computed, and the mode in which all x86-64 CPUs compute the same bits."""

import os
import shutil
import sys

import pytest
import torch
from conftest import events, first, run_python
from helpers import python, torchrun

from checks.run_log import first_difference
from plumbing import machine

CPU = torch.device("cpu")
needs_avx512_bf16 = pytest.mark.skipif(
    "ONEDNN_MAX_CPU_ISA" in os.environ or "avx512_bf16" not in machine.cpu_info()[1],
    reason="needs a CPU with AVX512-BF16, whose kernels are not restricted",
)


# ---- --deterministic=portable --------------------------------------------------------------------

PORTABLE = "--deterministic=portable"
ALL = (  # every extra, and what the loop adds
    "--optimizer=muon --dropout=0.1 --accum_steps=2 --ngram_rows=64 --conv_width=3 --n_layer=2 "
    "--ema_decay=0.9 --label_smoothing=0.1 --grad_checkpoint=true --max_steps=4"
).split()
OTHERS = {  # of a variable that the mode sets itself, the mode's value holds
    "OMP_NUM_THREADS": "4",
    "ATEN_CPU_CAPABILITY": "avx512",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
    "MKL_CBWR": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX2,-FMA",
}


@pytest.mark.parametrize(
    "launcher", first(1, [[sys.executable], torchrun(2)]), ids=["one", "ranks"]
)
def test_a_portable_run_has_the_same_bits_whatever_the_process_may_use(python_train, launcher):
    ours, theirs = (
        python_train(name, *ALL, PORTABLE, env={"OMP_NUM_THREADS": "1"} | env, launcher=launcher)
        for name, env in (("a", {}), ("b", OTHERS))
    )
    assert ours.fingerprint(4) == theirs.fingerprint(4)
    assert "deterministic portable" in ours.stdout
    facts = ours.facts
    assert facts["hardware"]["instruction_set"] == "AVX2" and facts["hardware"]["threads"] == 1


REFUSED = """
import torch
import train
from plumbing.cli import BadInput
def refused(*flags):
    try:
        train.main([f"--deterministic=portable", "--out_dir={out_dir}", *flags])
    except BadInput as error:
        print(error)
"""


def test_what_contradicts_the_mode_is_refused(tmp_path):
    out_dir = tmp_path / "run"
    source = """
refused("--dtype=bfloat16")
refused("--compile=true")
refused("--device=cuda")
train.torch.backends.cpu.get_cpu_capability = lambda: "DEFAULT"
refused()
"""
    lines = python(REFUSED.format(out_dir=out_dir) + source).splitlines()
    assert [line.partition("found ")[2] for line in lines] == [
        "--dtype=bfloat16",
        "--compile=true",
        "--device=cuda",
        "DEFAULT: it needs an x86-64 CPU with AVX2, and a process in which torch has computed nothing before train.main",
    ]
    assert not out_dir.exists()


@needs_avx512_bf16
def test_kernels_that_did_not_take_hold_are_refused(tmp_path):
    text = REFUSED.format(out_dir=tmp_path / "run") + "refused()\n"
    late = python("import torch\ntorch.ones(2) + 1\n" + text)
    assert "expected AVX2 kernels, found AVX512" in late
    assert not (tmp_path / "run").exists()


QEMU = shutil.which("qemu-x86_64-static")


@pytest.mark.slow
@pytest.mark.skipif(not QEMU, reason="needs qemu-x86_64-static: apt-get install qemu-user-static")
@pytest.mark.parametrize("cpu", ["Haswell", "EPYC-Rome"])
def test_another_cpu_computes_the_same_bits(python_train, cpu):
    """Emulated, in two to ten minutes: weights, moments, losses, evaluation and sampled text."""
    emulated = {"launcher": (QEMU, "-cpu", cpu, sys.executable), "timeout": 1800}
    flags = (*ALL, "--dataset=formula", "--eval_tokens=512", "--n_embd=64", "--block_size=32")
    here = python_train("here", *flags, PORTABLE)
    there = python_train("there", *flags, PORTABLE, **emulated)
    assert here.fingerprint(4) == there.fingerprint(4)
    assert first_difference(here.out_dir, there.out_dir) is None
    assert events(here, "sample")[0]["text"] == events(there, "sample")[0]["text"]

    here, there = (python_train(n, *flags, **how) for n, how in (("a", {}), ("b", emulated)))
    kernels = [run.facts["hardware"]["instruction_set"] for run in (here, there)]
    assert kernels[1] == "AVX2"  # so it is emulated
    if kernels[0] != "AVX2":
        assert here.fingerprint(4)["model"] != there.fingerprint(4)["model"]


# ---- records/portable ----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_record_verifies_itself():
    done = run_python("replay.py", "records/portable_formula", "--verify=true", timeout=900)
    assert done.returncode == 0, done.stderr
    assert "steps 1 to 90: all logged numbers are computed again" in done.stdout


@pytest.mark.slow
def test_this_cpu_computes_the_record(tmp_path):
    flags = ["--only=portable", "--dataset=formula", f"--data_dir={tmp_path}"]
    done = run_python("check.py", *flags, f"--out_dir={tmp_path / 'run'}", timeout=900)
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 0, last + done.stderr
    assert last.startswith("portable (records/portable_formula, SHA-256 ")
