"""Out of memory: the same batch again, in smaller micro-batches. The ranks agree on how a pass went."""

import torch

from plumbing.failures import RunFailed, out_of_memory
from plumbing.ranks import agree, sharded, world_size
from plumbing.rng import set_torch_rng_state, torch_rng_state
from plumbing.skipping import Buffers


def retry_on_oom(run, compute, key="micro_batch"):
    """Returns compute(); where memory runs out on any rank, halves run.state[key] and starts again.

    compute reads run.state[key] anew on each call, and may change nothing but gradients, torch's random
    state and buffers: those are put back before another try. It holds no collective operation (sharded
    models aside, which are never tried again). Raises RunFailed where a smaller micro-batch cannot help.

    Where a weight has a gradient on another rank but not here, because no row of this rank used it, it
    has one of zeros afterwards: the ranks must sum the same tensors.
    """
    state = run.state
    while True:
        rng = torch_rng_state(run.device)
        buffers = Buffers(run.model)
        result = None
        try:
            result = compute()
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            if sharded(run.model):  # the other ranks wait in the middle of their pass
                raise RunFailed(
                    "out of memory; with --shard=true try a smaller --batch_size with a "
                    "larger --accum_steps, --grad_checkpoint=true, --offload=true"
                ) from error
        used = [weight.grad is not None for weight in run.model.parameters()]
        failed, *used = agree(result is None, *used)  # one message for both
        if not failed:
            for weight, anywhere in zip(run.model.parameters(), used, strict=True):
                if anywhere and weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
            return result
        if state[key] == 1:
            raise RunFailed(
                "out of memory with a single sequence in a micro-batch; try "
                "--grad_checkpoint=true, a smaller --block_size, --n_embd or --n_layer"
            )
        result = None  # of a rank that had enough memory
        run.model.zero_grad(set_to_none=True)
        set_torch_rng_state(rng, run.device)
        buffers.put_back()
        if run.device.type != "cpu":
            torch.get_device_module(run.device).empty_cache()
        state[key] //= 2
        run.folder.event(state["step"], "out_of_memory", **{key: state[key]})


def rehearse(run, forward_backward, batch, compile):
    """One forward_backward(model, run, *batch) that changes nothing, before the first step: it compiles,
    and finds out whether the batch fits. Returns the model to train with, compiled or not.

    Where torch.compile fails, the run continues in eager mode, and a `compile_failed` event says why.
    """
    buffers = Buffers(run.model)
    model = run.model
    if compile:
        from torch._inductor import config as inductor  # not sooner: it takes most of a second

        inductor.deterministic = torch.are_deterministic_algorithms_enabled()  # no choice by timing
        model = torch.compile(model, dynamic=False)
    try:
        retry_on_oom(run, lambda: forward_backward(model, run, *batch))
    except Exception as error:
        if not compile or isinstance(error, RunFailed):
            raise
        reason = " ".join(str(error).split())[:200]  # the first line alone says nothing
        if world_size() > 1:  # another rank may have compiled: they must do the same
            raise RunFailed(f"torch.compile failed ({reason}); write --compile=false") from error
        run.folder.event(run.state["step"], "compile_failed", error=reason)
        model = rehearse(run, forward_backward, batch, compile=False)
    run.model.zero_grad(set_to_none=True)
    buffers.put_back()
    return model
