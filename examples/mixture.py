"""Several texts with shares, on the loop of train.py: an example of data of one's own.

    python prepare_data.py code --input='plumbing/*.py' --tokenizer=byte --val_fraction=0.2
    python prepare_data.py words --input='docs/*.md' --tokenizer=byte --val_fraction=0.2
    python examples/mixture.py --max_steps=200

Rows have the loss on each text, too: val_code, val_words; val_loss is their mean, by tokens.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train  # noqa: E402
from plumbing.cli import fail, run_script  # noqa: E402

SHARES = {"code": 700, "words": 300}  # dataset -> sequences of each block of 1,000
BLOCK = np.repeat(np.arange(len(SHARES)), list(SHARES.values()))


class Mixture:
    """Shuffled windows of several texts. `mixture[first, count]` is a batch that depends on nothing
    but its place, so a resume is exact: the order of a block is drawn from (seed, block)."""

    def __init__(self, texts: list):
        self.texts = texts

    def __len__(self) -> int:  # sequences until one of the texts begins anew
        pairs = zip(self.texts, SHARES.values(), strict=True)
        return min(len(text) * len(BLOCK) // share for text, share in pairs)

    def window(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        block, place = divmod(index, len(BLOCK))
        order = np.random.RandomState([self.texts[0].seed, block, 1]).permutation(BLOCK)
        same = order == order[place]  # windows of the same text
        return self.texts[order[place]][int(block * same.sum() + same[:place].sum()), 1]

    def __getitem__(self, batch: tuple[int, int]) -> list[np.ndarray]:
        windows = map(self.window, range(batch[0], sum(batch)))  # (first, count)
        return [np.concatenate(each) for each in zip(*windows, strict=True)]


def open_dataset(saved, open_one=train.open_dataset):
    name = train.dataset
    opened = [open_one(None) for train.dataset in SHARES]  # sets the knob that open_one reads
    train.dataset = name
    texts, windows, facts = zip(*opened, strict=True)
    metas = [each["meta"] for each in facts]
    same, *others = ({k: m.get(k) for k in ("tokenizer", "vocab_size", "chars")} for m in metas)
    if others != [same] * len(others):
        fail(f"{name}: different vocabularies; make all with --tokenizer=gpt2, or all with byte")
    counts = {k: sum(m[k] for m in metas) for k in ("train_tokens", "val_tokens", "val_bytes")}
    counts["val_tokens"] -= len(others)  # the first of each text is no target
    mark = f"{SHARES} {[each['fingerprint'] for each in facts]}"
    return Mixture(texts), windows, {"name": name, "fingerprint": mark, "meta": same | counts}


def evaluate(run, evaluate_one=train.evaluate):
    windows = run.val_data
    each = [evaluate_one(run) for run.val_data in windows]
    run.val_data = windows
    tokens = [numbers["val_tokens"] for numbers in each]
    means = {k: float(np.average([n[k] for n in each], weights=tokens)) for k in each[0]}
    losses = {f"val_{name}": n["val_loss"] for name, n in zip(SHARES, each, strict=True)}
    return means | {"val_tokens": sum(tokens)} | losses


vars(train).update(__doc__=__doc__, open_dataset=open_dataset, evaluate=evaluate)
vars(train).update(out_dir="out/mixture", dataset="+".join(SHARES), offline_dataset="")

if __name__ == "__main__":
    sys.exit(run_script(train.main))
