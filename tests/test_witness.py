"""The log as the witness: rows computed again are compared with those that it already holds."""

import json

from helpers import evaluation, event, row

from plumbing.witness import Witness, differing_fields

OLD = [
    row(1, 4.2),
    evaluation(2, 4.0),
    event(2, "saved", checkpoint="ckpt", sha256="a"),
    row(2, 4.1),
]


def test_rows_that_are_equal_to_the_bit_are_counted():
    witness = Witness(OLD)
    for again in json.loads(json.dumps(OLD)):
        witness.see(again | {"step_ms": 99.0})  # a time is no result
    assert (witness.compared, witness.equal, witness.first_difference) == (4, 4, None)
    assert not witness.old_rows


def test_the_first_difference_is_named_with_both_values():
    witness = Witness(OLD)
    witness.see(row(1, 4.2))
    witness.see(row(2, 4.1 + 1e-15, grad_norm=0.6))
    witness.see(event(2, "saved", checkpoint="ckpt", sha256="b"))
    found = {"step": 2, "field": "loss", "then": 4.1, "now": 4.1 + 1e-15}
    assert (witness.compared, witness.equal, witness.first_difference) == (3, 1, found)
    assert list(witness.old_rows) == [(2, "eval")]  # which nothing computed again


def test_rows_of_other_data_or_steps_are_not_compared():
    witness = Witness(OLD)
    witness.see(row(2, 3.0, sequences=99))  # past data that a rollback left out
    witness.see(row(3, 3.0))
    assert (witness.compared, witness.first_difference) == (0, None)


def test_of_two_rows_of_a_step_the_first_counts():
    witness = Witness([row(1, 4.2), row(1, 5.0)])
    witness.see(row(1, 4.2))
    assert (witness.compared, witness.equal) == (1, 1)


def test_null_equals_null_and_no_number():
    assert not differing_fields(row(1, None), row(1, None))
    assert differing_fields(row(1, None), row(1, 0.0)) == ["loss"]
