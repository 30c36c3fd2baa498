"""The warm-up pass, and torch.compile."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from plumbing.cli import RunFailed
from plumbing.console import one_line
from plumbing.out_of_memory import halving_on_oom, log_smaller_micro_batch
from plumbing.ranks import checksum, world_size
from plumbing.snapshot import Snapshot, clone


def warm_up(
    run,
    compile: bool,
    forward_backward: Callable,
    read: Callable[[], tuple],
) -> nn.Module:
    """Call forward_backward on the batch that read() returns, to compile and to find a micro-batch
    that fits. Nothing else changes. Returns the model, compiled or not. Raises RunFailed for a batch
    that is another one when it is read again.

    If torch.compile fails, a single process records `compile_failed` and runs eager."""
    log_smaller_micro_batch(run)  # notes the size that later ones are compared with
    state = clone(run.state)
    snapshot = Snapshot(run)
    model = compiled(run) if compile else run.model
    inputs, targets = read()
    if [*map(checksum, read())] != [checksum(inputs), checksum(targets)]:
        raise RunFailed(
            f"{type(run.train_data).__name__} gives another first batch when it is read again, so a "
            "resume would not be exact; draw from random, np.random or torch, which are seeded for "
            "each batch, or from a generator seeded with [seed, first]"
        )
    n_targets = torch.tensor(targets.numel(), device=run.device)
    take = partial(forward_backward, model, run, inputs, targets, n_targets)
    try:
        halving_on_oom(snapshot, take, len(inputs))
    except Exception as error:
        if not compile or isinstance(error, RunFailed) or world_size() > 1:
            raise  # eager on one rank and compiled on another would differ
        reason = one_line(error)
        snapshot.restore()
        model = warm_up(run, False, forward_backward, read)  # shows the eager error
        run.folder.event(run.state["step"], "compile_failed", error=reason)
    run.model.zero_grad(set_to_none=True)
    run.state.update(state | {"micro_batch": run.state["micro_batch"]})
    snapshot.restore()
    return model


def compiled(run) -> nn.Module:
    """The compiled model. torch says on stderr why it compiles another shape."""
    from torch._dynamo import config as dynamo  # only here: they take most of a second
    from torch._inductor import config as inductor

    inductor.deterministic = torch.are_deterministic_algorithms_enabled()  # no choice by timing
    # Every shape is compiled: past torch's limit, later shapes would compute in eager mode, and in
    # a resumed process, which counts anew, other ones.
    dynamo.recompile_limit = dynamo.accumulated_recompile_limit = 10**6
    torch._logging.set_logs(recompiles=True)
    return torch.compile(run.model, dynamic=False)
