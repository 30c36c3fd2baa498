"""What a checkpoint can restore: the rest is refused before the first step, not lost on a resume."""

import io
from collections import Counter, OrderedDict

import torch

from plumbing.configurator import fail


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
