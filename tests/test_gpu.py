"""What is claimed of CUDA: `python -m pytest -m gpu`; tests/gpu.sh runs this file and measures the
rest.

GPU_TESTS_ON=cpu runs on the CPU what can run there: that shows that the tests work, and nothing of
CUDA."""

import contextlib
import dataclasses
import io
import os
import re

import pytest
import torch
from conftest import Done, arguments, events
from helpers import ONE_THREAD, free_port, torchrun
from sources import around, scope_of, stop_at
from test_audit import flip_gradient

import train

ON = os.environ.get("GPU_TESTS_ON", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(ON == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
needs_cuda = pytest.mark.skipif(ON == "cpu", reason="there is nothing to see on a CPU")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
LAST = 12  # steps of every run here


@pytest.fixture
def run(run_train, data_dir, tmp_path):
    """run(out_dir, *flags, ok=0, before="", fresh=False, env=None) -> Done, which must exit with
    `ok`.

    In this process, since each new one takes three seconds to reach the GPU; with `fresh` or `env`
    in one of its own."""

    def run(out_dir, *flags, ok=0, before="", fresh=False, env=None):
        if ON == "cpu" and "--dtype=float16" in flags:
            pytest.skip("float16 is refused on a CPU")
        flags = (f"--device={ON}", "--n_layer=2", *flags)
        if fresh or env:  # compiling for the first time may take minutes
            done = run_train(out_dir, *flags, before=before, env=env, timeout=200, code=ok)
        else:
            _, *argv = arguments(tmp_path / out_dir, data_dir, flags)
            done = dataclasses.replace(here(argv, before), out_dir=tmp_path / out_dir)
        assert done.returncode == ok, done.stderr + done.stdout
        return done

    return run


def here(argv, before):
    """train.main(argv) after the source `before`, of which nothing stays."""
    torch._dynamo.reset()  # or it would soon refuse to compile yet another model
    kept, printed = dict(vars(train)), io.StringIO()
    try:
        exec(before, scope_of(train))
        with contextlib.redirect_stdout(printed):
            code = train.main(argv)
    finally:
        vars(train).clear()
        vars(train).update(kept)
    return Done(None, code, printed.getvalue(), "")


def losses(done):
    return [row["loss"] for row in done.rows("train")]


# ---- bit for bit ---------------------------------------------------------------------------------


@pytest.mark.parametrize("compile", ["eager", "compiled"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_resume_is_bit_exact(dtype, compile, run):
    flags = (f"--dtype={dtype}", f"--compile={compile == 'compiled'}")
    flags += ("--dropout=0.1", "--ema_decay=0.9", "--accum_steps=2", "--batch_size=4")
    whole = run("whole", *flags)
    run("parts", *flags, before=stop_at(5), ok=143)
    resumed = run("parts", *flags, fresh=True)
    assert not events(whole, "compile_failed")
    assert events(resumed, "resume")
    assert resumed.fingerprint(LAST) == whole.fingerprint(LAST)


KINDS = {
    "adamw": "--accum_steps=2",
    "muon": "--optimizer=muon",
    "momentum": "--optimizer=momentum --grad_clip=0",
    "recomputing": "--grad_checkpoint=true --dropout=0.1",
    "float16": "--dtype=float16",
    "compiled": "--dtype=bfloat16 --compile=true --dropout=0.1",
}


@pytest.mark.parametrize("kind", KINDS)
def test_in_deterministic_mode_a_step_done_again_has_the_same_bits(kind, run):
    done = run("run", *KINDS[kind].split(), "--deterministic=true", "--audit_interval=3")
    assert "deterministic true" in done.stdout
    assert not events(done, "audit") and not events(done, "compile_failed")
    assert events(done, "sample"), done.stdout


def test_the_audit_finds_a_flipped_bit_and_heals_it(run):
    clean = run("clean")
    healed = run("healed", "--audit_interval=3", before=flip_gradient([1]))
    (event,) = events(healed, "audit")
    assert event["step"] == 6 and event["odd"] == "first" and event["tensors"]
    assert "gradient/head.weight" in event["tensors"]
    assert healed.fingerprint(LAST) == clean.fingerprint(LAST)


# ---- a step --------------------------------------------------------------------------------------

PROFILED = """
from torch.autograd import DeviceType
from torch.profiler import record_function

BAD = 5  # finished steps before the one that is profiled, whose gradient is not finite
WAITS = "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize"
READS = "Memcpy DtoH", "aten::_local_scalar_dense"

def train_step(model, run, *rest, inner=train.train_step):
    if run.state["step"] != BAD:
        return inner(model, run, *rest)
    weights = [weight.clone() for weight in run.model.parameters()]
    with torch.profiler.profile() as profiler:
        with record_function("whole_step"):
            numbers = inner(model, run, *rest)
    all = profiler.events()
    [step] = [e for e in all if e.name == "whole_step" and e.device_type == DeviceType.CPU]
    # the profiler itself waits for the device when it stops, and perhaps when it starts
    within = step.time_range
    found = [e.name for e in all if e.name.startswith(WAITS) and within.start < e.time_range.start < within.end]
    found += [e.name for e in all if e.name.startswith(READS)]
    kernels = sum("LaunchKernel" in e.name for e in all)
    moved = sum(not torch.equal(*pair) for pair in zip(weights, run.model.parameters()))
    print(f"WAITS {len(found)} {sorted(set(found))} MOVED {moved} LAUNCHED {kernels}")
    return numbers

train.train_step = train_step
"""
BAD = 'if run.state["step"] == BAD:\n    run.model.head.weight.grad.mul_(math.nan)'
PROFILED += around("forward_backward", then=BAD)


def profiled(done):
    """(waits of the host, weights that moved, kernels launched) in the step to be skipped."""
    found = re.search(r"WAITS (\d+) .* MOVED (\d+) LAUNCHED (\d+)", done.stdout)
    return tuple(map(int, found.groups()))


SKIPS = {
    "adamw": "--dtype=bfloat16 --ema_decay=0.9",
    "momentum": "--optimizer=momentum",
    "muon": "--optimizer=muon",
    "float16": "--dtype=float16",
    "compiled": "--dtype=bfloat16 --compile=true",
}


@pytest.mark.parametrize("kind", SKIPS)
def test_a_bad_step_is_skipped_on_the_device_and_the_host_never_waits(kind, run):
    done = run("run", *SKIPS[kind].split(), before=PROFILED)
    waits, moved, launched = profiled(done)
    assert (waits, moved) == (0, 0), done.stdout
    assert launched > 0 or ON == "cpu"
    assert 6 in [row["step"] for row in events(done, "skipped")]


LIMIT = """
total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction(600e6 / total)
"""


@needs_cuda
def test_where_memory_runs_out_the_micro_batch_is_halved_and_the_loss_stays(run):
    flags = ("--n_embd=256", "--block_size=128", "--batch_size=256", "--max_steps=4")
    whole = run("whole", *flags)
    halved = run("halved", *flags, before=LIMIT, fresh=True)
    assert events(halved, "out_of_memory") and not events(whole, "out_of_memory")
    assert losses(halved) == pytest.approx(losses(whole), rel=1e-4)


@needs_cuda
def test_the_gpu_computes_what_the_cpu_does(run, run_train):
    """Float32 on both; rows of the GPU tell its memory and MFU (its utilization needs NVML)."""
    gpu = run("gpu", "--dtype=float32")
    cpu = run_train("cpu", "--device=cpu", "--n_layer=2", "--dtype=float32")
    assert losses(gpu) == pytest.approx(losses(cpu), rel=5e-3)
    row = gpu.rows("train")[-1]
    assert row["mem_gb"] > 0 and row["mfu"] > 0


# ---- sharded, and on several GPUs ----------------------------------------------------------------


def one_rank():
    """The environment that torchrun gives to a single rank."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_sharded_run_of_one_rank_resumes_bit_for_bit_and_learns_as_a_plain_one(dtype, run):
    sharded = ("--shard=true", f"--dtype={dtype}")
    whole = run("whole", *sharded, env=one_rank())
    run("parts", *sharded, env=one_rank(), before=stop_at(5), ok=143)
    resumed = run("parts", *sharded, env=one_rank())
    assert resumed.fingerprint(LAST) == whole.fingerprint(LAST)
    assert events(whole, "sample"), whole.stdout
    plain = run("plain", f"--dtype={dtype}")
    assert losses(whole) == pytest.approx(losses(plain), rel=1e-2 if dtype == "float16" else 1e-3)


@needs_two
@pytest.mark.parametrize("flags", ["--shard=false", "--shard=true"], ids=["plain", "sharded"])
def test_two_ranks_resume_bit_for_bit(flags, python_train, tmp_path):
    def ranks(out_dir, max_steps):
        steps = (f"--max_steps={max_steps}", f"--decay_steps={LAST}")
        same = ("--device=cuda", "--n_layer=2", "--dropout=0.1", flags)
        return python_train(out_dir, *same, *steps, launcher=torchrun(2), env=ONE_THREAD)

    whole = ranks("whole", LAST)
    ranks("parts", 5)
    resumed = ranks("parts", LAST)
    ours, expected = resumed.fingerprint(LAST), whole.fingerprint(LAST)
    for part in ("model", "optimizer", "rng"):
        assert ours[part] == expected[part], part
