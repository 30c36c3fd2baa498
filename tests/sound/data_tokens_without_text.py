"""Tokens that stand for notes, without a tokenizer; the stock model."""

from shared import np, use

import train  # noqa: F401

rows = np.random.RandomState(0).randint(-2, 3, size=(900, 33)).cumsum(1) % 24
use([(row[:-1], row[1:]) for row in rows], vocab_size=24)
