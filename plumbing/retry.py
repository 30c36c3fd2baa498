"""Out of memory: retry the batch in smaller micro-batches, on all ranks if on one."""

import torch

from plumbing.cli import RunFailed
from plumbing.failures import out_of_memory
from plumbing.nested import clone
from plumbing.ranks import agree, sharded, world_size
from plumbing.rng import set_torch_rng_state, torch_rng_state
from plumbing.skipping import Buffers


def retry_on_oom(run, compute, key="micro_batch"):
    """Return compute(). If memory runs out on any rank, halve run.state[key] and try again.

    compute reads run.state[key] on each call, and may change only gradients, torch's random state
    and buffers, which are reset before another try. It has no collective operation, except for a
    sharded model, which is not tried again. Raises RunFailed if a smaller micro-batch cannot help.

    A weight that got a gradient on another rank but not here, because no row of this rank used it,
    gets a gradient of zeros: the ranks must sum the same tensors.
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
            if sharded(run.model):  # the other ranks wait in mid-pass
                raise RunFailed(
                    "out of memory; with --shard=true try a smaller --batch_size with a "
                    "larger --accum_steps, --grad_checkpoint=true, --offload=true"
                ) from error
        used = [weight.grad is not None for weight in run.model.parameters()]
        failed, *used = agree(result is None, *used)  # one collective for both
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
        result = None  # frees that of a rank that had enough memory
        run.model.zero_grad(set_to_none=True)
        set_torch_rng_state(rng, run.device)
        buffers.put_back()
        if run.device.type != "cpu":
            torch.get_device_module(run.device).empty_cache()
        state[key] //= 2
        run.folder.event(state["step"], "out_of_memory", **{key: state[key]})


def rehearse(run, forward_backward, batch, compile):
    """Call forward_backward(model, run, *batch) once before the first step, to compile and to find
    a micro-batch that fits. Nothing else changes. Returns the model, compiled or not.

    If torch.compile fails, a single process records `compile_failed` and runs eager; ranks fail.
    Raises RunFailed if the forward pass makes a buffer, which a resumed model would not have.
    """
    names = run.model.state_dict().keys()
    state = clone(run.state)
    buffers = Buffers(run.model)
    model = run.model
    if compile:
        from torch._inductor import config as inductor  # only here: it takes most of a second

        inductor.deterministic = torch.are_deterministic_algorithms_enabled()  # no choice by timing
        model = torch.compile(model, dynamic=False)
    try:
        retry_on_oom(run, lambda: forward_backward(model, run, *batch, batch[1].numel()))
    except Exception as error:
        if not compile or isinstance(error, RunFailed):
            raise
        reason = " ".join(str(error).split())[:200]  # its first line says too little
        if world_size() > 1:  # others may have compiled, and all must do the same
            raise RunFailed(f"torch.compile failed ({reason}); write --compile=false") from error
        run.folder.event(run.state["step"], "compile_failed", error=reason)
        model = rehearse(run, forward_backward, batch, compile=False)
    if late := run.model.state_dict().keys() - names:
        raise RunFailed(f"the first forward pass makes {min(late)}; expected it from __init__")
    run.model.zero_grad(set_to_none=True)
    run.state.update(state | {"micro_batch": run.state["micro_batch"]})
    buffers.put_back()
    return model
