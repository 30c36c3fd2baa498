"""Walk through, map and copy nested dicts, lists and tuples of tensors and plain values."""

import copy

import torch


def leaves(value, path=()):
    """Yields (path, leaf) for all that is not a dict, list or tuple. path: a tuple of its keys."""
    if isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, (*path, key))
    else:
        yield path, value


def tensors(value):
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def mapped(function, value, path=()):
    """`value` with each leaf replaced by function(leaf, path). Containers keep their types."""
    if isinstance(value, dict):
        items = {key: mapped(function, item, (*path, key)) for key, item in value.items()}
        new = copy.copy(value)
        dict.update(new, items)  # Counter.update would add
        return new
    if isinstance(value, list | tuple):
        return type(value)(mapped(function, item, (*path, n)) for n, item in enumerate(value))
    return function(value, path)


def clone(value):
    """A detached copy that shares no memory with `value`, on the same devices."""

    def copied(leaf, path):
        return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)

    return mapped(copied, value)
