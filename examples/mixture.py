"""Several texts with shares, on the loop of train.py: an example of data of one's own.

    python prepare_data.py code --input='plumbing/*.py' --tokenizer=byte --val_fraction=0.2
    python prepare_data.py words --input='docs/*.md' --tokenizer=byte --val_fraction=0.2
    python examples/mixture.py --max_steps=200

Each block of 1,000 sequences holds exactly the shares below, in an order drawn from (seed, block). So a
batch depends on nothing but its place: a resume is exact, on any number of ranks. The validation loss
is that of all texts together, by tokens; the rows of metrics.jsonl also have it for each text.
"""

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train  # noqa: E402
from plumbing.cli import run_script  # noqa: E402
from plumbing.data import DataError, OrderedWindows, fingerprint, open_split  # noqa: E402
from plumbing.ranks import from_rank0  # noqa: E402
from prepare_data import dataset_of_run  # noqa: E402

SHARES = {"code": 700, "words": 300}  # dataset -> sequences of each block
BLOCK = sum(SHARES.values())
OF_A_TEXT = ("source", "dtype", "sha256", "train_tokens", "val_tokens", "val_bytes")


class Mixture:
    """Shuffled windows of several texts as one endless sequence, a pure function of (seed, index).
    `mixture[first, count]` is a batch: inputs and targets, each int64 (count, block_size)."""

    def __init__(self, texts: list, shares: list[int], seed: int):
        self.texts = texts
        self.shares = shares
        self.seed = seed

    def __len__(self) -> int:
        """Sequences until one of the texts begins anew: what a run counts as an epoch."""
        pairs = zip(self.texts, self.shares, strict=True)
        return min(len(text) * sum(self.shares) // share for text, share in pairs)

    def order(self, block: int) -> np.ndarray:
        """The number of the text of each sequence in a block."""
        random_state = np.random.RandomState([self.seed, block, 1])
        return random_state.permutation(np.repeat(np.arange(len(self.shares)), self.shares))

    def __getitem__(self, batch: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        first, count = batch
        size = sum(self.shares)
        parts = []
        while count:
            block, begin = divmod(first, size)
            order = self.order(block)
            here = order[begin : begin + count]
            pair = [np.empty((len(here), self.texts[0].block_size), np.int64) for _ in range(2)]
            for number in np.unique(here):
                # those of one text are consecutive in it: the block's first, and those before `here`
                start = block * self.shares[number] + np.count_nonzero(order[:begin] == number)
                rows = here == number
                read = self.texts[number][int(start), int(rows.sum())]
                for whole, part in zip(pair, read, strict=True):
                    whole[rows] = part
            parts.append(pair)
            first += len(here)
            count -= len(here)
        inputs, targets = (np.concatenate(each) for each in zip(*parts, strict=True))
        return inputs, targets


def open_dataset(saved):
    """As train.open_dataset: (training data, validation data, facts)."""
    options = {"data_dir": train.data_dir, "block_size": train.block_size, "say": train.say}
    opened = [from_rank0(lambda n=n: dataset_of_run(n, "", None, **options)) for n in SHARES]
    metas = [meta for _, _, meta in opened]
    vocabularies = [{k: v for k, v in m.items() if k not in OF_A_TEXT} for m in metas]
    for name, vocabulary in zip(SHARES, vocabularies, strict=True):
        if vocabulary != vocabularies[0]:
            found = f"{next(iter(SHARES))} and {name} have different vocabularies"
            raise DataError(f"{found}; make both with --tokenizer=gpt2, or both with byte")
    trains, vals = (
        [open_split(folder, meta, split) for _, folder, meta in opened]
        for split in ("train", "val")
    )
    texts = [train.ShuffledWindows(tokens, train.block_size, train.seed) for tokens in trains]
    mixture = Mixture(texts, list(SHARES.values()), train.seed)
    windows = [OrderedWindows(tokens, train.block_size, train.eval_tokens) for tokens in vals]
    marks = json.dumps([SHARES, [fingerprint(meta) for meta in metas]])
    meta = vocabularies[0] | {
        "train_tokens": sum(map(len, trains)),
        "val_tokens": sum(len(tokens) - 1 for tokens in vals) + 1,  # the first of each is no target
        "val_bytes": sum(meta["val_bytes"] for meta in metas),
        "source": " and ".join(meta["source"] for meta in metas),
    }
    mark = hashlib.sha256(marks.encode()).hexdigest()[:16]
    return mixture, windows, {"name": "+".join(SHARES), "fingerprint": mark, "meta": meta}


def evaluate(run, evaluate_one=train.evaluate):
    """As train.evaluate, over all texts, and the loss of each."""
    windows = run.val_data
    each = {}
    for name, run.val_data in zip(SHARES, windows, strict=True):
        each[name] = evaluate_one(run)
    run.val_data = windows
    tokens = sum(numbers["val_tokens"] for numbers in each.values())
    means = {
        key: sum(numbers[key] * numbers["val_tokens"] for numbers in each.values()) / tokens
        for key in ("val_loss", "val_accuracy")
    }
    of_each = {f"val_{name}": numbers["val_loss"] for name, numbers in each.items()}
    return means | {"val_tokens": tokens} | of_each


train.__doc__ = __doc__
train.open_dataset = open_dataset
train.evaluate = evaluate
train.out_dir = "out/mixture"
train.dataset = "+".join(SHARES)

if __name__ == "__main__":
    sys.exit(run_script(train.main))
