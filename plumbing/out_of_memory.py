"""Memory runs out: try again in smaller micro-batches, on all ranks if on one."""

import re
from collections.abc import Callable
from typing import Any

import torch

from plumbing.cli import RunFailed
from plumbing.ranks import is_sharded, max_over_ranks
from plumbing.snapshot import Snapshot


def halving_on_oom(snapshot: Snapshot, compute: Callable[[], Any], sequences: int) -> Any:
    """Return compute(). If memory runs out on any rank, restore `snapshot`, halve the micro-batch in
    run.state, which compute reads, and try again. compute has no collective operation, except for
    a sharded model, which is not tried again. Raises RunFailed if a smaller micro-batch cannot
    help.

    sequences: that compute takes on this rank: a limit above them is no limit. One message to the
    other ranks says what else they must agree on: a weight that only their sequences used gets a
    gradient of zeros here, because all ranks sum the same tensors; and signals.agreed_stop."""
    run = snapshot.run
    weights = [] if is_sharded(run.model) else list(run.model.parameters())
    while True:
        result = None
        try:
            result = compute()
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            if is_sharded(run.model):  # other ranks wait within this pass, and cannot try again
                raise RunFailed("out of memory; try a smaller --batch_size or --n_embd") from error
        has_gradient = [weight.grad is not None for weight in weights]
        failed, most, stop, *needed = max_over_ranks(
            result is None, sequences, run.signals.stop, *has_gradient
        )
        if not failed:
            break
        size = min(run.state["micro_batch"], most)
        if size == 1:
            hint = "--grad_checkpoint=true, a smaller --block_size, --n_embd or --n_layer"
            raise RunFailed(f"out of memory with a single sequence in a micro-batch; try {hint}")
        result = None  # frees the memory of a rank that had enough
        run.model.zero_grad(set_to_none=True)
        snapshot.restore()
        run.state["micro_batch"] = int(size) // 2
        run.halved_at = run.state["step"] + torch.is_grad_enabled()  # else in an evaluation
    run.signals.agreed_stop = int(stop)
    for weight, is_needed in zip(weights, needed, strict=True):
        if is_needed and weight.grad is None:
            weight.grad = torch.zeros_like(weight)
    return result


def log_smaller_micro_batch(run) -> None:
    """Record an event if the micro-batch has become smaller since the last call."""
    now = run.state["micro_batch"]
    if now < run.noted_size:
        step = min(run.halved_at, run.state["step"])  # in the warm-up pass none was taken
        run.folder.event(step, "out_of_memory", micro_batch=now)
    run.noted_size = now


def out_of_memory(error: BaseException) -> bool:
    """Whether `error` means that memory ran out. Only its text says so where an allocator raises a
    plain RuntimeError: on the CPU, on MPS, and in CUDA's libraries."""
    texts = r"can't allocate memory|out of memory|CU(BLAS|DNN)_STATUS_ALLOC_FAILED"
    is_named = isinstance(error, RuntimeError) and re.search(texts, str(error))
    return isinstance(error, MemoryError) or bool(is_named)
