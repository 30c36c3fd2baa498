"""What a checkpoint can restore: anything else is refused, not lost on a resume."""

import io
from collections import Counter, OrderedDict

import torch

from plumbing import ranks
from plumbing.cli import RunFailed, fail
from plumbing.nested import leaves


def refuse_what_is_lost(run):
    """Exits with 2 if a resume could not restore the state of `run`, or a weight that it trains."""
    if lost := not_restorable(run.state, "FRESH_STATE"):
        fail(lost)
    known = {id(weight) for weight in run.model.parameters()}
    groups = [group for optimizer in run.optimizers for group in optimizer.param_groups]
    if any(id(weight) not in known for group in groups for weight in group["params"]):
        fail(
            "an optimizer trains a weight that is not in model.parameters(): no checkpoint would hold it"
        )


def not_restorable(value, name):
    """Which part of `value`, called `name`, torch.load(weights_only=True) cannot read, or None."""
    if value is None or type(value) in (bool, int, float, str) or isinstance(value, torch.Tensor):
        return None
    if type(value) in (dict, OrderedDict, Counter, list, tuple):
        parts = list(value.items() if isinstance(value, dict) else enumerate(value))
        found = [not_restorable(part, f"{name}[{key!r}]") for key, part in parts]
        found += [not_restorable(key, f"a key of {name}") for key, _ in parts]
        return next(filter(None, found), None)
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # pickle and torch raise half a dozen types
        return f"{name} is a {type(value)}, which checkpoints cannot restore: expected plain values"
    return None


def refuse_unequal_replicas(run):
    """Raises RunFailed if ranks differ in what a checkpoint keeps of rank 0 alone: weights and buffers
    that are not sharded, and the loop's state."""
    state = {**run.model.state_dict(), "FRESH_STATE": run.state}
    kept = {".".join(map(str, path)): leaf for path, leaf in leaves(state)}
    counters = "num_batches_tracked"  # BatchNorm's: ranks may have more or fewer micro-batches
    alike = {n: kept[n] for n in kept if not hasattr(kept[n], "to_local") and counters not in n}
    if names := ranks.replicas_differ(alike):
        raise RunFailed(
            f"at step {run.state['step']} the ranks hold different bits in {', '.join(names)}, of which a "
            "checkpoint keeps those of rank 0: a step must draw and add the same numbers on every rank; "
            "the newest checkpoint is from before that"
        )
