"""A batch is a pure function of (seed, first sequence, count), and what follows from that: no loader
has a state, and workers, micro-batches and ranks change no order."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import arguments

import dataset
import plumbing
import train
from plumbing import BadInput, Reader, RunFailed
from train import OrderedWindows, ShuffledWindows

BLOCK = 8
TOKENS = 8 * 50 + 5  # 49 windows: one less than fit, so that there is room for any shift


def split_of(folder, ids):
    ids.tofile(folder / "ids.bin")
    return np.memmap(folder / "ids.bin", ids.dtype, "r")


@pytest.fixture
def tokens(tmp_path):
    """Every token is its own position, so that a window says where it was read."""
    return split_of(tmp_path, np.arange(TOKENS, dtype=np.uint16))


@pytest.fixture
def windows(tokens):
    return ShuffledWindows(tokens, BLOCK, seed=1337)


def random_state():
    return repr(plumbing.rng_state(torch.device("cpu")))


# ---- windows to train on -------------------------------------------------------------------------


def test_an_epoch_holds_each_window_exactly_once_from_a_shift_of_its_own(windows):
    """Its targets are the tokens one place on; over epochs each token that fits is one."""
    assert len(windows) == 49
    shifts, orders, seen = set(), set(), set()
    for epoch in range(60):
        inputs, targets = windows[49 * epoch, 49]
        assert inputs.dtype == targets.dtype == np.int64
        assert np.array_equal(inputs, inputs[:, :1] + np.arange(BLOCK))
        assert np.array_equal(targets, inputs + 1)
        begins = inputs[:, 0]
        shift = int(begins.min())
        assert sorted(begins) == [shift + BLOCK * n for n in range(49)] and 0 <= shift < BLOCK
        shifts.add(shift)
        orders.add(tuple(np.argsort(begins)))
        seen.update(targets.flat)
    assert len(shifts) == BLOCK and len(orders) == 60 and seen == set(range(1, 400))


@pytest.mark.parametrize("first", [0, 48, 6000])
def test_a_batch_depends_on_nothing_but_its_place(tokens, windows, first):
    """Also across two epochs."""
    fresh = ShuffledWindows(tokens, BLOCK, seed=1337)[first, 6]
    for before in (30, 5400, 18, 6006, 0):
        windows[before, 6]
    train.seed_everything(7)
    state = random_state()
    assert all(map(np.array_equal, windows[first, 6], fresh))
    assert random_state() == state
    other = ShuffledWindows(tokens, BLOCK, seed=1338)[first, 6]
    assert not np.array_equal(other[0], fresh[0])


def test_the_order_and_the_cuts_are_those_of_ever(windows):
    """Runs depend on it: recorded with the code of the first release."""
    assert windows[0, 6][0][:, 0].tolist() == [383, 39, 143, 31, 359, 367]


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_change_no_order(data_dir, tmp_path, workers):
    """Of the batches from the place on where the state of the run is."""
    flags = [f"--num_workers={workers}", "--batch_size=5", "--seed=3"]
    with train.build(arguments(tmp_path, data_dir, flags)) as run:
        names = [Path(data.tokens.filename).name for data in (run.train_data, run.val_data)]
        assert names == ["train.bin", "val.bin"]
        run.state.update(step=2, sequences=150)
        batches = train.load_batches(run)
        for first in range(150, 190, 5):
            expected = train.batch_at(run, first, 5)
            assert all(map(np.array_equal, next(batches), expected))
        batches.close()
    plumbing.kill_workers()


@pytest.mark.parametrize("count", [1, 6, 64])
@pytest.mark.parametrize("length", [BLOCK + 1, 2 * BLOCK, TOKENS])
def test_validation_counts_every_token_exactly_once(tmp_path, length, count):
    """The last window overlaps the one before: its repeated targets are masked."""
    data = OrderedWindows(split_of(tmp_path, np.arange(length, dtype=np.uint32)), BLOCK)
    pairs = [data[n, min(count, len(data) - n)] for n in range(0, len(data), count)]
    inputs, targets = (np.concatenate(part) for part in zip(*pairs, strict=True))
    assert targets[targets != -100].tolist() == list(range(1, length))
    assert np.array_equal(inputs, inputs[:, :1] + np.arange(BLOCK))  # nothing of them is masked
    assert train.count_targets(torch.from_numpy(targets)) == length - 1


PARTS = [(1, 8), (8, 8), (9, 16), (TOKENS - 2, TOKENS - 1), (10**9, TOKENS - 1)]


@pytest.mark.parametrize("n_targets, expected", PARTS)
def test_a_part_of_the_validation_tokens_is_its_first_ones(tokens, n_targets, expected):
    """Rounded up to windows; never more than there are."""
    data = OrderedWindows(tokens, BLOCK, n_targets)
    targets = data[0, len(data)][1]
    assert targets[targets != -100].tolist() == list(range(1, expected + 1))


# ---- an ordinary Dataset of PyTorch --------------------------------------------------------------


class Rows(torch.utils.data.Dataset):
    """A row shows its index, and what it draws from each generator."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return [index, random.random(), np.random.rand(), torch.rand(1).item()], float(index)


def test_rows_are_shuffled_each_epoch_and_draw_by_seed_and_place_alone():
    state = random_state()
    whole, targets = Reader(dataset.Shuffled(Rows(), 7), 7)[0, 20]
    assert random_state() == state and whole.dtype == targets.dtype == np.float32
    parts = [Reader(dataset.Shuffled(Rows(), 7), 7)[place] for place in ((13, 7), (0, 6), (6, 7))]
    assert np.array_equal(np.concatenate([parts[n][0] for n in (1, 2, 0)]), whole)
    epochs = whole[:10], whole[10:]
    assert all(sorted(epoch[:, 0]) == list(range(10)) for epoch in epochs)
    assert not np.array_equal(*epochs) and len(np.unique(whole[:, 1:])) == 60
    assert not np.array_equal(dataset.Shuffled(Rows(), 8)[0, 20][0], whole)
    in_order = dataset.InOrder(torch.utils.data.Subset(Rows(), [4, 2, 9]), 7)
    assert in_order[1, 2][1].tolist() == [2, 9]
    assert np.array_equal(in_order[1, 2][0], in_order[0, 3][0][1:])


class Stream(torch.utils.data.IterableDataset):
    def __len__(self):
        return 9

    def __iter__(self):
        return iter([(1, 2)] * 9)


LOADER = torch.utils.data.DataLoader([(1, 2)] * 9)
UNEQUAL = [([1], 1), ([1, 2], 1)]
REFUSED = {
    "a stream": (lambda: dataset.Shuffled(Stream(), 1), "Stream has no rows by number"),
    "a loader": (lambda: dataset.InOrder(LOADER, 1), "in place of a DataLoader its dataset"),
    "no rows": (lambda: dataset.InOrder([], 1), "list is empty"),
    "no length": (lambda: dataset.InOrder(iter([1]), 1), "has no length"),
    "several shapes": (lambda: dataset.InOrder(UNEQUAL, 1)[0, 2], "collate=FUNCTION a batch of"),
    "three parts": (lambda: Reader(dataset.InOrder([(1, 2, 3)] * 2, 1), 1)[0, 2], "expected (inp"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_gives_no_rows_is_told_what_does_in_one_line(what):
    make, words = REFUSED[what]
    with pytest.raises((BadInput, RunFailed)) as error:
        make()
    assert words in str(error.value) and "\n" not in str(error.value)
