"""What is claimed of CUDA. tests/gpu.sh runs this file, and measures the rest.

GPU_TESTS_ON=cpu runs on the CPU what can run there: that shows that the tests work, and nothing of
CUDA."""

import os

import pytest
import torch
from sources import around, stop_at

ON = os.environ.get("GPU_TESTS_ON", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(ON == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
needs_cuda = pytest.mark.skipif(ON == "cpu", reason="there is nothing to see on a CPU")
TOO_FEW = ON == "cuda" and torch.cuda.device_count() < 2
FLAGS = f"--device={ON} --n_layer=2 --save_interval=4 --eval_interval=6 --log_interval=1".split()
KINDS = {
    "float32": "--dtype=float32 --batch_size=4 --accum_steps=2",
    "bfloat16": "--dtype=bfloat16 --ema_decay=0.9",
    "float16": "--dtype=float16",
    "muon": "--optimizer=muon",
    "momentum": "--optimizer=momentum --peak_lr=0.1",
    "recomputing": "--grad_checkpoint=true --num_workers=1",
    "compiled": "--dtype=bfloat16 --compile=true",
}


def resumes_exactly(run_train, flags, **how):
    """A run that is stopped and killed must end as one that is not."""
    flags = (*FLAGS, "--dropout=0.1", *flags)
    whole = run_train("whole", *flags, limit=200, **how)  # the first one compiles
    run_train("parts", *flags, before=stop_at(5), code=143, **how)
    run_train("parts", *flags, before=stop_at(10, "SIGKILL"), code=None, **how)
    done = run_train("parts", *flags, **how)
    assert done.fingerprint() == whole.fingerprint() != whole.fingerprint(8)
    for event in done.events("resume_checked"):
        assert event["steps"] > 0 and event["first_difference"] is None
    assert len(done.events("resume_checked")) == 2
    assert whole.events("sample") and not whole.events("compile_failed")


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_is_bit_exact(kind, run_train):
    resumes_exactly(run_train, KINDS[kind].split())


@pytest.mark.skipif(TOO_FEW, reason="needs two CUDA GPUs")
@pytest.mark.parametrize("shard", ["false", "true"])
def test_two_ranks_resume_bit_for_bit(shard, run_train):
    resumes_exactly(run_train, [f"--shard={shard}"], ranks=2)


WATCHED = around(
    "train_step",
    """
    is_bad = run.state["step"] == 5
    handle = run.model.head.weight.register_hook(lambda grad: grad * np.nan if is_bad else grad)
    before = [weight.clone() for weight in run.model.parameters()]
    if torch.cuda.is_available() and run.state["step"] > 2:  # the first steps allocate
        torch.cuda.set_sync_debug_mode("error")
    """,
    """
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")
    handle.remove()
    moved = sum(not torch.equal(*pair) for pair in zip(before, run.model.parameters()))
    assert (moved == 0) == is_bad, f"step {run.state['step']}: {moved} weights moved"
    """,
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_step_is_skipped_and_the_host_waits_in_none(kind, run_train):
    done = run_train("run", *FLAGS, *KINDS[kind].split(), before=WATCHED, limit=200)
    assert 6 in [row["step"] for row in done.rows("train") if row["skipped"]]
    assert [row["step"] for row in done.rows("train")] == [*range(1, 13)]


LIMIT = """
total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction(600e6 / total)
"""


@needs_cuda
def test_where_memory_runs_out_the_micro_batch_is_halved_and_the_loss_stays(run_train):
    flags = (*FLAGS, "--n_embd=256", "--block_size=128", "--batch_size=256", "--max_steps=4")
    whole = run_train("whole", *flags)
    halved = run_train("halved", *flags, before=LIMIT)
    assert halved.events("out_of_memory") and not whole.events("out_of_memory")
    assert halved.losses == pytest.approx(whole.losses, rel=1e-4)


@needs_cuda
def test_the_gpu_computes_what_the_cpu_does(run_train):
    gpu = run_train("gpu", *FLAGS)
    cpu = run_train("cpu", *FLAGS, "--device=cpu")
    assert gpu.losses == pytest.approx(cpu.losses, rel=5e-3)
