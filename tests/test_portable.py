"""Which kernels computed, and the mode in which all x86-64 CPUs compute the same bits."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import REPO, first, read_rows

from plumbing import machine
from reporting.records import computed_rows, what_differs

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
import sys
import torch
from plumbing.machine import kernel_bits
print(*(kernel_bits(torch.device("cpu"), *how.split()) for how in {how!r}))
print({{"model", "optim", "train"}} & sys.modules.keys())
"""


@needs_avx512_bf16
@pytest.mark.parametrize(
    "variable, value, differ",
    first(
        1,
        [
            ("ATEN_CPU_CAPABILITY", "avx2", ["float32 adamw", "float32 sgd", "bfloat16 adamw"]),
            ("ONEDNN_MAX_CPU_ISA", "AVX2", ["float32 muon", "bfloat16 adamw"]),
            ("MKL_CBWR", "COMPATIBLE", ["float32 adamw", "float32 muon"]),
        ],
    ),
)
def test_other_kernels_have_other_bits(variable, value, differ):
    """So that a run is not taken for the same one on a CPU whose name hides other units."""
    here = [machine.kernel_bits(CPU, *how.split()) for how in differ]
    print_bits = PRINT_BITS.format(how=differ)
    *there, loaded = python(print_bits, **{variable: value}).split()
    assert all(len(bits) == 16 for bits in here)
    assert not set(here) & set(there)
    assert loaded == "set()", "a fork's model or optimizer is other code, not another kernel"


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


# ---- --deterministic=portable --------------------------------------------------------------------

PORTABLE = "--deterministic=portable"
ALL = (  # every extra, and what the loop adds
    "--optimizer=muon --dropout=0.1 --accum_steps=2 --ngram_rows=64 --conv_width=3 --n_layer=2 "
    "--n_future_tokens=2 --ema_decay=0.9 --label_smoothing=0.1 --grad_checkpoint=true --max_steps=4"
).split()
OTHERS = {  # of a variable that the mode sets itself, the mode's value holds
    "OMP_NUM_THREADS": "4",
    "ATEN_CPU_CAPABILITY": "avx512",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
    "MKL_CBWR": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX512F,-AVX2,-FMA",
}


ONE = [sys.executable]
TORCHRUN = [*ONE, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


@pytest.mark.parametrize("launcher", first(1, [ONE, TORCHRUN]), ids=["one", "ranks"])
def test_a_portable_run_has_the_same_bits_whatever_the_process_may_use(python_train, launcher):
    ours, theirs = (
        python_train(name, *ALL, PORTABLE, env={"OMP_NUM_THREADS": "1"} | env, launcher=launcher)
        for name, env in (("a", {}), ("b", OTHERS))
    )
    assert ours.returncode == theirs.returncode == 0, theirs.stderr
    assert ours.fingerprint(4) == theirs.fingerprint(4)
    assert "deterministic portable: the same bits" in ours.stdout
    facts = json.loads((ours.out_dir / "run.json").read_text())
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
train.machine.cpu_info = lambda: ("an old CPU", frozenset())
refused()
"""
    lines = python(REFUSED.format(out_dir=out_dir) + source).splitlines()
    assert [line.partition("found ")[2] for line in lines] == [
        "--dtype=bfloat16",
        "--compile=true",
        "--device=cuda",
        "an old CPU",
    ]
    assert not out_dir.exists()


@needs_avx512_bf16
def test_the_mode_proves_itself(tmp_path):
    out_dir = tmp_path / "run"
    source = """
train.machine.PORTABLE_RELEASE = train.torch.__version__.partition("+")[0]
train.machine.PORTABLE_KERNELS.pop("MKL_CBWR")
refused()
train.machine.PORTABLE_RELEASE = "2.11.0"
refused()
"""
    text = REFUSED.format(out_dir=out_dir)
    late, of_release = python("import torch\ntorch.ones(2) + 1\n" + text + source).splitlines()
    assert "found AVX512 and " in late
    assert late.endswith("an operation ran before train.main; start a new process")
    assert "these bits are those of torch 2.11.0" in of_release
    lacking, _ = python(text + source).splitlines()
    assert "found AVX2 and " in lacking
    assert not out_dir.exists()


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
    assert here.returncode == there.returncode == 0, there.stderr
    assert here.fingerprint(4) == there.fingerprint(4)
    assert computed_rows(here.out_dir) == computed_rows(there.out_dir)

    here, there = (python_train(n, *flags, **how) for n, how in (("a", {}), ("b", emulated)))
    kernels = [
        json.loads((run.out_dir / "run.json").read_text())["hardware"]["instruction_set"]
        for run in (here, there)
    ]
    assert kernels[1] == "AVX2"  # so it is emulated
    if kernels[0] != "AVX2":
        assert here.fingerprint(4)["model"] != there.fingerprint(4)["model"]


# ---- records/portable ----------------------------------------------------------------------------


FOUND = {
    "a digit of a loss": ("rows", lambda rows: rows[40].update(loss=rows[40]["loss"] + 1e-7)),
    "the sequence": ("rows", lambda rows: rows[40].update(sequences=48)),
    "a number of a step": ("rows", lambda rows: rows[40].update(step=1)),
    "another field": ("rows", lambda rows: rows[40].update(accuracy=0.9)),
    "a row less": ("rows", lambda rows: rows.pop(40)),
    "the last rows less": ("rows", lambda rows: rows.__delitem__(slice(80, None))),
    "two rows swapped": ("rows", lambda rows: rows.insert(40, rows.pop(41))),
    "a digit of a hash": ("rows", lambda rows: rows[1].update(sha256="0" * 64)),
    "the validation loss": ("rows", lambda rows: rows[-4].update(val_loss=1.4)),
    "the sample": ("rows", lambda rows: rows[-3].update(text="To be, or not to be")),
    "the seed": ("facts", lambda facts: facts["config"].update(seed=1)),
    "a flag": ("facts", lambda facts: facts["config"].update(n_layer=2)),
    "the data": ("facts", lambda facts: facts["run"].update(data="0" * 64)),
    "the release of torch": ("facts", lambda facts: facts["run"].update(torch="2.12.0")),
}
NOT_FOUND = {
    "a time": ("rows", lambda rows: rows[40].update(step_ms=1.0)),
    "the end": ("rows", lambda rows: rows[-1].update(ended="finished in a second")),
    "the date": ("facts", lambda facts: facts.update(start="2020-01-01T00:00:00+00:00")),
    "the machine": ("facts", lambda facts: facts["hardware"].update(cpu="an older CPU")),
    "the command": ("facts", lambda facts: facts.update(command=["train.py"])),
}


@pytest.mark.parametrize("forgery", [None, *FOUND, *NOT_FOUND])
def test_a_forged_record_is_found_but_for_what_computing_does_not_give(tmp_path, forgery):
    record = REPO / "records" / "portable"
    rows, facts = read_rows(record), json.loads((record / "run.json").read_text())
    if forgery:
        file, edit = {**FOUND, **NOT_FOUND}[forgery]
        edit({"rows": rows, "facts": facts}[file])
    (tmp_path / "run.json").write_text(json.dumps(facts))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert bool(what_differs(tmp_path, record)) == (forgery in FOUND)


@pytest.mark.slow
def test_a_record_verifies_itself():
    command = [sys.executable, "replay.py", "records/portable_formula", "--verify=99"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "90 of 90 steps computed again: all bits equal" in done.stdout


@pytest.mark.slow
def test_this_cpu_computes_the_record(tmp_path):
    flags = ["--only=portable", "--dataset=formula", f"--data_dir={tmp_path}"]
    command = [sys.executable, "check.py", *flags, f"--out_dir={tmp_path / 'run'}"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=900)
    last = done.stdout.splitlines()[-1]
    assert done.returncode == 0, last + done.stderr
    assert last.startswith("portable: the bits of records/portable_formula (SHA-256 ")
