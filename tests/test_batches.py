"""The batch as a pure function of (seed, first sequence, count), and what follows from that."""

import math
import os
import pickle
from collections import Counter

import numpy as np
import pytest
import torch

from plumbing.dataset import Tokens
from plumbing.windows import OrderedWindows, ShuffledWindows

BLOCK = 8
TOKENS = 8 * 50 + 5  # 49 windows: one less than fit, so that there is room for any shift


@pytest.fixture
def tokens(tmp_path):
    """Every token is its own position, so that a window says where it was read."""
    np.arange(TOKENS, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    return Tokens([tmp_path / "ids.bin"], "uint16")


@pytest.fixture
def windows(tokens):
    return ShuffledWindows(tokens, BLOCK, seed=1337)


def starts(dataset, count):
    """Where the first `count` windows begin, in their order."""
    return dataset[0, count][0][:, 0].tolist()


def test_targets_are_the_tokens_one_place_on(windows):
    inputs, targets = windows[18, 6]
    assert inputs.shape == targets.shape == (6, BLOCK)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(BLOCK))


def test_an_epoch_holds_each_window_exactly_once(windows):
    assert len(windows) == 49
    for epoch in range(3):
        inputs = torch.cat([windows[49 * epoch + 7 * n, 7][0] for n in range(7)])
        seen = Counter(inputs.flatten().tolist())
        assert set(seen.values()) == {1} and len(seen) == 49 * BLOCK
        shift = inputs.min().item()
        assert 0 <= shift < BLOCK
        assert sorted(inputs[:, 0].tolist()) == [shift + BLOCK * n for n in range(49)]


@pytest.mark.parametrize("count", [6, 49, 120])
def test_a_batch_may_lie_across_epochs(windows, count):
    drawn = [start for first in range(0, 240, count) for start in windows[first, count][0][:, 0]]
    order = [start for epoch in range(4) for start in windows.starts(epoch)]
    assert [start.item() for start in drawn[: 4 * 49]] == order


def test_order_and_boundaries_change_with_every_epoch(windows):
    epochs = [windows.starts(epoch).tolist() for epoch in range(20)]
    assert len({tuple(epoch) for epoch in epochs}) == 20
    assert len({min(epoch) for epoch in epochs}) > 3  # boundaries, of which there are eight
    assert len({tuple(np.argsort(epoch)) for epoch in epochs}) == 20


def test_another_seed_is_another_order(tokens):
    assert starts(ShuffledWindows(tokens, BLOCK, 1), 48) == starts(
        ShuffledWindows(tokens, BLOCK, 1), 48
    )
    assert starts(ShuffledWindows(tokens, BLOCK, 1), 48) != starts(
        ShuffledWindows(tokens, BLOCK, 2), 48
    )


@pytest.mark.parametrize("first", [0, 48, 6000])
def test_a_batch_depends_on_nothing_but_its_place(tokens, windows, first):
    fresh = ShuffledWindows(tokens, BLOCK, seed=1337)[first, 6]
    for before in (30, 5400, 18, 6006, 0):
        windows[before, 6]
    torch.manual_seed(7)
    np.random.seed(7)
    globally = np.random.get_state()[1].copy(), torch.get_rng_state()
    assert all(map(torch.equal, windows[first, 6], fresh))
    assert np.array_equal(np.random.get_state()[1], globally[0])
    assert torch.equal(torch.get_rng_state(), globally[1])


@pytest.mark.parametrize("split", [ShuffledWindows, OrderedWindows])
@pytest.mark.parametrize("parts", [[4, 2], [1, 5], [2, 2, 2], [1] * 6])
def test_any_split_into_ranks_reads_the_same_global_batch(tokens, split, parts):
    dataset = split(tokens, BLOCK, 1337)
    ends = np.cumsum([0, *parts])
    for first in (0, 42, 44):  # 44: the last six of a validation split, and across two epochs
        whole = dataset[first, 6]
        each = [dataset[first + int(n), part] for n, part in zip(ends[:-1], parts, strict=True)]
        for part, expected in zip(zip(*each, strict=True), whole, strict=True):
            assert torch.equal(torch.cat(part), expected)


@pytest.mark.parametrize("count", [1, 6, 49, 64])
@pytest.mark.parametrize("length", [BLOCK + 1, BLOCK + 2, 2 * BLOCK, 2 * BLOCK + 1, TOKENS])
def test_validation_counts_every_token_exactly_once(tmp_path, length, count):
    np.arange(length, dtype=np.uint32).tofile(tmp_path / "val.bin")
    windows = OrderedWindows(Tokens([tmp_path / "val.bin"], "uint32"), BLOCK)
    firsts = range(0, len(windows), count)
    pairs = [windows[first, min(count, len(windows) - first)] for first in firsts]
    counted = [targets[targets != -100] for _, targets in pairs]
    assert torch.cat(counted).tolist() == list(range(1, length))  # each has one before it
    for x, y in pairs:
        assert torch.equal(x, x[:, :1] + torch.arange(BLOCK))  # nothing is masked in the input
        assert torch.equal(y, torch.where(y == -100, -100, x + 1))


@pytest.mark.parametrize(
    "n_targets, expected", [(1, 8), (8, 8), (9, 16), (TOKENS - 2, TOKENS - 1), (10**9, TOKENS - 1)]
)
def test_a_part_of_the_validation_tokens_is_its_first_ones(tokens, n_targets, expected):
    """Rounded up to windows of 8; never more than there are."""
    windows = OrderedWindows(tokens, BLOCK, n_targets)
    _, targets = windows[0, len(windows)]
    assert targets[targets != -100].tolist() == list(range(1, expected + 1))


def test_batches_travel_to_workers_that_are_spawned(windows):
    """A spawned worker has no override of a config global, and no open file of its parent."""
    windows[9, 3]  # an epoch's order may lie in the cache
    wanted = [(44, 3), (47, 6), (53, 1)]
    loader = torch.utils.data.DataLoader(
        windows, sampler=wanted, batch_size=None, num_workers=1, multiprocessing_context="spawn"
    )
    for batch, (inputs, targets) in zip(wanted, loader, strict=True):
        assert torch.equal(inputs, windows[batch][0]) and torch.equal(targets, windows[batch][1])
    assert len(pickle.dumps(windows)) < 10_000  # the text stays on the disk


# ---- a split in several files --------------------------------------------------------------------


@pytest.fixture
def shards(tmp_path):
    """The same tokens as `ids`, in files of which some are shorter than a window."""
    tokens, ends = np.arange(TOKENS, dtype=np.uint16), [0, 100, 103, 104, 104 + BLOCK, 250, TOKENS]
    paths = [tmp_path / f"train_{n:05}.bin" for n in range(len(ends) - 1)]
    for path, begin, end in zip(paths, ends[:-1], ends[1:], strict=True):
        tokens[begin:end].tofile(path)
    return paths


@pytest.mark.parametrize("length", [1, BLOCK + 1, 120, TOKENS])
def test_a_row_may_lie_across_files_in_any_order_of_rows(shards, length):
    tokens = Tokens(shards, "uint16")
    assert len(tokens) == TOKENS
    start = np.random.RandomState(0).permutation(TOKENS - length + 1)
    rows = tokens.read(start, length)
    assert rows.dtype == np.int64
    assert np.array_equal(rows, start[:, None] + np.arange(length))
    assert tokens.read([], length).shape == (0, length)


@pytest.mark.parametrize("start", [-1, TOKENS - BLOCK + 1, TOKENS])
def test_a_row_outside_the_split_is_refused(shards, start):
    with pytest.raises(IndexError, match=f"of {TOKENS} tokens"):
        Tokens(shards, "uint16").read([0, start], BLOCK)


def test_across_shards_epochs_a_resume_and_other_ranks_each_token_comes_once_an_epoch(shards):
    """12 sequences a step: 3 epochs begun on 2 ranks, resumed on 3 at step 5 and on 1 at step 8."""

    def resumed():  # in a new process
        return ShuffledWindows(Tokens(shards, "uint16"), BLOCK, seed=1337)

    windows = resumed()
    steps = math.ceil(3 * len(windows) / 12)
    seen = []
    for begin, end, ranks in [(0, 5, 2), (5, 8, 3), (8, steps, 1)]:
        of = [resumed() for _ in range(ranks)]
        part = 12 // ranks
        for step in range(begin, end):
            seen += [of[rank][12 * step + rank * part, part][0] for rank in range(ranks)]
    inputs = torch.cat(seen)
    assert torch.equal(inputs, windows[0, 12 * steps][0])
    for epoch in range(3):
        tokens = inputs[epoch * len(windows) : (epoch + 1) * len(windows)]
        counts = Counter(tokens.flatten().tolist())
        assert set(counts.values()) == {1} and len(counts) == len(windows) * BLOCK


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files in /proc")
def test_reading_leaves_no_file_open(shards):
    tokens = Tokens(shards, "uint16")
    before = len(os.listdir("/proc/self/fd"))
    kept = [tokens.read(range(index, 300, 7), BLOCK) for index in range(50)]
    assert len(os.listdir("/proc/self/fd")) == before and len(kept) == 50
    assert len(pickle.dumps(tokens)) < 10_000  # the text stays on the disk
