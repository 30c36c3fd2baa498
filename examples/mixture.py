"""Several texts with shares, on the loop of train.py: an example of data of one's own.

    python prepare_data.py code --input='plumbing/*.py' --tokenizer=byte --val_fraction=0.2
    python prepare_data.py words --input='docs/*.md' --tokenizer=byte --val_fraction=0.2
    python examples/mixture.py --max_steps=200

Rows have the loss on each text, too: val_code, val_words; val_loss is their mean, by tokens.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train  # noqa: E402
from plumbing.cli import fail, run_script, setting  # noqa: E402

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
        random_state = np.random.RandomState([self.texts[0].seed, block, 1])
        order = random_state.permutation(BLOCK)
        same = order == order[place]  # windows of the same text
        before = int(block * same.sum() + same[:place].sum())
        return self.texts[order[place]][before, 1]

    def __getitem__(self, batch: tuple[int, int]) -> list[np.ndarray]:
        first, count = batch
        windows = [self.window(index) for index in range(first, first + count)]
        inputs, targets = zip(*windows, strict=True)
        return [np.concatenate(inputs), np.concatenate(targets)]


def open_dataset(saved, open_one=train.open_dataset):
    """The texts of SHARES, opened one by one by train.py's own function, which reads its knob."""
    texts, windows, metas, fingerprints = [], [], [], []
    for name in SHARES:
        with setting(vars(train), dataset=name):
            text, window, facts = open_one(None)
        texts.append(text)
        windows.append(window)
        metas.append(facts["meta"])
        fingerprints.append(facts["fingerprint"])
    vocabularies = [vocabulary_of(meta) for meta in metas]
    if any(vocabulary != vocabularies[0] for vocabulary in vocabularies):
        found = f"{train.dataset}: different vocabularies"
        fail(f"{found}; make all with --tokenizer=gpt2, or all with byte")
    meta = vocabularies[0]
    for name in ("train_tokens", "val_tokens", "val_bytes"):
        meta[name] = sum(own[name] for own in metas)
    meta["val_tokens"] -= len(metas) - 1  # the first token of a text is no target
    facts = {"name": train.dataset, "fingerprint": f"{SHARES} {fingerprints}", "meta": meta}
    return Mixture(texts), windows, facts


def vocabulary_of(meta: dict) -> dict:
    return {name: meta.get(name) for name in ("tokenizer", "vocab_size", "chars")}


def evaluate(run, evaluate_one=train.evaluate):
    """The means over all texts, by their tokens, and the loss on each."""
    results = []
    for windows in run.val_data:
        results.append(evaluate_one(replace(run, val_data=windows)))
    tokens = [result["val_tokens"] for result in results]
    numbers = {"val_tokens": sum(tokens)}
    for name in ("val_loss", "val_accuracy"):
        values = [result[name] for result in results]
        numbers[name] = float(np.average(values, weights=tokens))
    for name, result in zip(SHARES, results, strict=True):
        numbers[f"val_{name}"] = result["val_loss"]
    return numbers


vars(train).update(__doc__=__doc__, open_dataset=open_dataset, evaluate=evaluate)
vars(train).update(out_dir="out/mixture", dataset="+".join(SHARES))

if __name__ == "__main__":
    sys.exit(run_script(train.main))
