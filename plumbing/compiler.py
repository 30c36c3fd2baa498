"""The warm-up pass, and torch.compile."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from plumbing.cli import RunFailed
from plumbing.fields import check_names
from plumbing.out_of_memory import halving_on_oom, log_smaller_micro_batch
from plumbing.ranks import world_size
from plumbing.snapshot import Snapshot, clone


def warm_up(
    run,
    compile: bool,
    forward_backward: Callable,
    read: Callable[[], tuple],
) -> nn.Module:
    """Call forward_backward on the batch that read() returns, to compile and to find a micro-batch
    that fits. Nothing else changes. Returns the model, compiled or not.

    If torch.compile fails, a single process records `compile_failed` and runs eager."""
    log_smaller_micro_batch(run)  # the sizes to compare later ones with
    state = clone(run.state)
    before = Snapshot(run)
    model = compiled(run.model) if compile else run.model
    inputs, targets = read()
    n_targets = torch.tensor(targets.numel(), device=run.device)
    take = partial(forward_backward, model, run, inputs, targets, n_targets)
    try:
        numbers = halving_on_oom(before, take)
        check_names(numbers, "the model", ("model",))
    except Exception as error:
        if not compile or isinstance(error, RunFailed) or world_size() > 1:
            raise  # of several ranks, others may have compiled
        reason = " ".join(str(error).split())[:200]  # its first line is not enough
        before.restore()
        model = warm_up(run, False, forward_backward, read)  # shows the eager error
        run.folder.event(run.state["step"], "compile_failed", error=reason)
    run.model.zero_grad(set_to_none=True)
    run.state.update(state | {"micro_batch": run.state["micro_batch"]})
    before.restore()
    return model


def compiled(model: nn.Module) -> nn.Module:
    from torch._dynamo import config as dynamo  # only here: they take most of a second
    from torch._inductor import config as inductor

    inductor.deterministic = torch.are_deterministic_algorithms_enabled()  # no choice by timing
    # Every shape is compiled: past torch's limit, later shapes would compute in eager mode, and in
    # a resumed process, which counts anew, other ones. Each time, torch says why.
    dynamo.recompile_limit = dynamo.accumulated_recompile_limit = 10**6
    torch._logging.set_logs(recompiles=True)
    return torch.compile(model, dynamic=False)
