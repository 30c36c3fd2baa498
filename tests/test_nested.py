"""What a step changes is nested at will: a copy of it is whole, of the same types, and shares nothing."""

from collections import Counter, OrderedDict, defaultdict

import torch
from plumbing.nested import clone, leaves, mapped, tensors

VALUE = {
    "weights": OrderedDict(a=torch.ones(2), b=[torch.zeros(1), (3, "x")]),
    "seen": Counter("aab"),
    "lists": defaultdict(list, {1: [1.5], "1": [None]}),
    (1, 2): {4},
    "empty": {},
}


def test_a_leaf_is_found_under_the_keys_that_lead_to_it():
    found = dict(leaves(VALUE))
    assert found["weights", "b", 1, 0] == 3 and found["seen", "a"] == 2 and found[(1, 2),] == {4}
    assert found["lists", 1, 0] == 1.5 and found["lists", "1", 0] is None  # two keys, not one
    assert len(found) == 9 and len(tensors(VALUE)) == 2


def test_a_clone_is_equal_in_value_and_type_and_shares_nothing():
    before = repr(VALUE)
    one = clone(VALUE)
    assert repr(one) == before  # with the types of all containers
    one["weights"]["a"] += 1
    one["weights"]["b"][0] += 1
    one["seen"]["a"] += 1
    one["lists"][1].append(2)
    one["lists"]["new"].append(2)
    one[1, 2].add(5)
    assert repr(VALUE) == before


def test_each_leaf_can_be_replaced():
    shapes = mapped(lambda leaf, path: (len(path), type(leaf).__name__), VALUE)
    assert shapes["weights"]["b"] == [(3, "Tensor"), ((4, "int"), (4, "str"))]
    assert shapes["seen"] == Counter({"a": (2, "int"), "b": (2, "int")})
