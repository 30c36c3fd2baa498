"""Dicts, lists and tuples of tensors and plain values, nested at will: walked through, and copied."""

import copy

import torch


def leaves(value, path=()):
    """(path, leaf) of all that is no dict, list or tuple. path: the keys that lead there, a tuple."""
    if isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, (*path, key))
    else:
        yield path, value


def tensors(value):
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def mapped(function, value, path=()):
    """`value` with function(leaf, path) in the place of each leaf. Containers keep their types."""
    if isinstance(value, dict):
        items = {key: mapped(function, item, (*path, key)) for key, item in value.items()}
        new = copy.copy(value)
        dict.update(new, items)  # not that of a Counter, which adds
        return new
    if isinstance(value, list | tuple):
        return type(value)(mapped(function, item, (*path, n)) for n, item in enumerate(value))
    return function(value, path)


def clone(value):
    """A copy that shares nothing with `value`; on the same devices."""

    def copied(leaf, path):
        return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)

    return mapped(copied, value)
