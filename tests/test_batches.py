"""The batch as a pure function of (seed, split, index), and what follows from that."""

import math
import os
import pickle
from collections import Counter

import numpy as np
import pytest
import torch

from train import Batches

BLOCK = 8
TOKENS = 8 * 50 + 5  # 49 windows: one less than fit, so that there is room for any shift


@pytest.fixture
def ids(tmp_path):
    """A split whose every token is its own position, so that a batch says where it was read."""
    np.arange(TOKENS, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    return str(tmp_path / "ids.bin")


def batches(ids, batch_rows=6, rows=None, seed=1337, block_size=BLOCK):
    return Batches(ids, "uint16", block_size, batch_rows, rows or range(batch_rows), seed)


def starts(split, count):
    """Where the windows of the first `count` global batches begin, in their order."""
    return torch.cat([split[index][0][:, 0] for index in range(count)]).tolist()


def test_targets_are_the_tokens_one_place_on(ids):
    tokens, targets = batches(ids)[3]
    assert tokens.shape == targets.shape == (6, BLOCK)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, tokens + 1)
    assert torch.equal(tokens, tokens[:, :1] + torch.arange(BLOCK))


def test_an_epoch_holds_each_window_exactly_once(ids):
    split = batches(ids, batch_rows=7)  # 7 batches to an epoch of 49 windows
    assert (split.windows, len(split)) == (49, 7)
    for epoch in range(3):
        tokens = torch.cat([split[7 * epoch + index][0] for index in range(7)])
        seen = Counter(tokens.flatten().tolist())
        assert set(seen.values()) == {1} and len(seen) == 49 * BLOCK
        shift = tokens.min().item()
        assert 0 <= shift < BLOCK
        assert sorted(tokens[:, 0].tolist()) == [shift + BLOCK * n for n in range(49)]


def test_a_batch_may_lie_across_two_epochs(ids):
    split = batches(ids, batch_rows=6)  # 49 = 8 x 6 + 1
    drawn = starts(split, 17)[: 2 * 49]
    assert drawn[:49] == split.starts(0).tolist() and drawn[49:] == split.starts(1).tolist()


def test_order_and_boundaries_change_with_every_epoch(ids):
    split = batches(ids)
    epochs = [split.starts(epoch).tolist() for epoch in range(20)]
    assert len({tuple(epoch) for epoch in epochs}) == 20
    assert len({min(epoch) for epoch in epochs}) > 3  # boundaries, of which there are eight
    assert len({tuple(np.argsort(epoch)) for epoch in epochs}) == 20


def test_another_seed_is_another_order(ids):
    assert starts(batches(ids, seed=1), 8) == starts(batches(ids, seed=1), 8)
    assert starts(batches(ids, seed=1), 8) != starts(batches(ids, seed=2), 8)


@pytest.mark.parametrize("index", [0, 8, 1000])
def test_a_batch_depends_on_nothing_but_its_index(ids, index):
    fresh = batches(ids)[index]
    used = batches(ids)
    for before in (5, 900, 3, 1001, 0):
        used[before]
    torch.manual_seed(7)
    np.random.seed(7)
    globally = np.random.get_state()[1].copy(), torch.get_rng_state()
    assert all(map(torch.equal, used[index], fresh))
    assert np.array_equal(np.random.get_state()[1], globally[0])
    assert torch.equal(torch.get_rng_state(), globally[1])


@pytest.mark.parametrize("seed", [1337, None])
@pytest.mark.parametrize("parts", [[4, 2], [1, 5], [2, 2, 2], [1] * 6])
def test_any_split_into_ranks_reads_the_same_global_batch(ids, seed, parts):
    ends = np.cumsum([0, *parts])
    ranges = [range(a, b) for a, b in zip(ends[:-1], ends[1:], strict=True)]
    for index in (0, 7, 8):  # 8 lies across two epochs, and is the last of a validation split
        whole = batches(ids, seed=seed)[index]
        split = [batches(ids, rows=rows, seed=seed)[index] for rows in ranges]
        for part, expected in zip(zip(*split, strict=True), whole, strict=True):
            assert torch.equal(torch.cat(part), expected)


@pytest.mark.parametrize("batch_rows", [1, 6, 49, 64])
@pytest.mark.parametrize("tokens", [BLOCK + 1, BLOCK + 2, 2 * BLOCK, 2 * BLOCK + 1, TOKENS])
def test_validation_counts_every_token_exactly_once(tmp_path, tokens, batch_rows):
    np.arange(tokens, dtype=np.uint32).tofile(tmp_path / "val.bin")
    split = Batches(tmp_path / "val.bin", "uint32", BLOCK, batch_rows, range(batch_rows))
    pairs = [split[index] for index in range(len(split))]
    counted = [targets[targets != -100] for _, targets in pairs]
    assert torch.cat(counted).tolist() == list(range(1, tokens))  # each has one before it
    for x, y in pairs:
        assert torch.equal(x, x[:, :1] + torch.arange(BLOCK))  # nothing is masked in the input
        assert torch.equal(y, torch.where(y == -100, -100, x + 1))


def test_validation_is_the_same_for_every_seed_and_time(ids):
    first, again = batches(ids, seed=None), batches(ids, seed=None)
    assert starts(first, len(first)) == starts(again, len(again))


def test_batches_travel_to_workers_that_are_spawned(ids):
    """A spawned worker has no override of a config global, and no open file of its parent."""
    split = batches(ids, rows=range(2, 5))
    split[9]  # an epoch's order may lie in the cache
    loader = torch.utils.data.DataLoader(
        split,
        sampler=range(7, 11),
        batch_size=None,
        num_workers=1,
        multiprocessing_context="spawn",
    )
    for index, (tokens, targets) in zip(range(7, 11), loader, strict=True):
        assert torch.equal(tokens, split[index][0]) and torch.equal(targets, split[index][1])
    assert len(pickle.dumps(split)) < 10_000  # the text stays on the disk


# --- a split in several files ---


@pytest.fixture
def shards(tmp_path):
    """The same tokens as `ids`, in files of which some are shorter than a window."""
    tokens, ends = np.arange(TOKENS, dtype=np.uint16), [0, 100, 103, 104, 104 + BLOCK, 250, TOKENS]
    paths = [tmp_path / f"train_{n:05}.bin" for n in range(len(ends) - 1)]
    for path, begin, end in zip(paths, ends[:-1], ends[1:], strict=True):
        tokens[begin:end].tofile(path)
    return paths


@pytest.mark.parametrize("seed", [1337, None])
def test_windows_cross_from_one_file_into_the_next(ids, shards, seed):
    one, many = batches(ids, seed=seed), batches(shards, seed=seed)
    assert (len(one), one.n_tokens) == (len(many), many.n_tokens)
    for index in range(20 if seed else len(one)):
        assert all(map(torch.equal, many[index], one[index]))


def test_across_shards_epochs_a_resume_and_other_ranks_each_token_comes_once_an_epoch(shards):
    """12 sequences a step: 3 epochs begun on 2 ranks, resumed on 3 at step 5 and on 1 at step 8."""
    split = batches(shards, batch_rows=12)
    steps = math.ceil(3 * split.windows / 12)
    seen = []
    for first, last, ranks in [(0, 5, 2), (5, 8, 3), (8, steps, 1)]:
        part = 12 // ranks
        rows = [range(rank * part, rank * part + part) for rank in range(ranks)]
        resumed = [
            batches(shards, batch_rows=12, rows=mine) for mine in rows
        ]  # all in new processes
        seen += [torch.cat([of[step][0] for of in resumed]) for step in range(first, last)]
    windows = torch.cat(seen)
    undisturbed = torch.cat([split[step][0] for step in range(steps)])
    assert torch.equal(windows, undisturbed)
    for epoch in range(3):
        tokens = windows[epoch * split.windows : (epoch + 1) * split.windows]
        counts = Counter(tokens.flatten().tolist())
        assert set(counts.values()) == {1} and len(counts) == split.windows * BLOCK


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files in /proc")
def test_reading_leaves_no_file_open(shards):
    split = batches(shards)
    before = len(os.listdir("/proc/self/fd"))
    kept = [split[index] for index in range(50)]
    assert len(os.listdir("/proc/self/fd")) == before and len(kept) == 50
    assert len(pickle.dumps(split)) < 10_000
