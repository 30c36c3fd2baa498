"""examples/mixture.py: exact shares, a pure function of the place, and vocabularies that agree."""

import subprocess
import sys

import numpy as np
import pytest
from conftest import REPO, fingerprint, pydoc_text, read_rows

import train
from prepare_data import prepare

before = dict(vars(train))
from examples.mixture import BLOCK, SHARES, Mixture  # noqa: E402

vars(train).update(before)  # the other tests of this process have the plain train.py

FLAGS = {
    "block_size": 16,
    "batch_size": 8,
    "n_layer": 1,
    "n_head": 2,
    "n_embd": 32,
    "report": "false",
}
FLAGS |= {"warmup_steps": 2, "decay_steps": 12, "device": "cpu", "compile": "false"}


@pytest.fixture
def mixture(tmp_path):
    """Ids of the second text are 30,000 and more."""
    texts = []
    for begin in (0, 30_000):
        np.arange(begin, begin + 8000, dtype=np.uint16).tofile(tmp_path / str(begin))
        texts.append(
            train.ShuffledWindows(np.memmap(tmp_path / str(begin), "uint16", "r"), 8, seed=1)
        )
    return Mixture(texts)


def test_each_block_holds_exactly_its_shares_and_each_text_comes_in_its_own_order(mixture):
    inputs, targets = mixture[0, 3 * len(BLOCK)]
    assert np.array_equal(targets, inputs + 1)
    is_second = inputs[:, 0] >= 30_000
    orders = is_second.reshape(3, len(BLOCK))
    assert SHARES["words"] == 300 and orders.sum(1).tolist() == [300] * 3
    for number, rows in enumerate((~is_second, is_second)):
        assert np.array_equal(inputs[rows], mixture.texts[number][0, rows.sum()][0])
    assert (orders[0] != orders[1]).any() and (orders[1] != orders[2]).any()


@pytest.mark.parametrize("first", [0, 995, 2000])
def test_a_batch_is_the_same_in_any_parts(mixture, first):
    whole = mixture[first, 12]
    for sizes in ([4, 8], [1] * 12, [5, 1, 6]):
        ends = np.cumsum([0, *sizes])
        parts = [mixture[first + int(e), n] for e, n in zip(ends[:-1], sizes, strict=True)]
        for one, several in zip(whole, zip(*parts, strict=True), strict=True):
            assert np.array_equal(one, np.concatenate(several))


def run(tmp_path, out_dir, **flags):
    flags = FLAGS | {"out_dir": tmp_path / out_dir, "data_dir": tmp_path} | flags
    command = [
        sys.executable,
        REPO / "examples/mixture.py",
        *(f"--{k}={v}" for k, v in flags.items()),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def texts(tmp_path):
    for name, text in (("code", pydoc_text()[:20_000]), ("words", pydoc_text()[-9000:])):
        (tmp_path / f"{name}.txt").write_text(text)
        prepare(name, tmp_path, str(tmp_path / f"{name}.txt"), "byte", say=lambda *words: None)


def test_a_run_resumes_bit_for_bit_and_is_validated_on_each_text(tmp_path, texts):
    for out_dir, steps in (("straight", 12), ("stopped", 5), ("stopped", 12)):
        done = run(tmp_path, out_dir, max_steps=steps)
        assert done.returncode == 0, done.stderr
    checkpoints = [tmp_path / name / "ckpt_00000012.pt" for name in ("straight", "stopped")]
    assert fingerprint(checkpoints[0]) == fingerprint(checkpoints[1])
    first, *_, last = read_rows(tmp_path / "straight", "eval")
    assert last["val_code"] < first["val_code"] and last["val_words"] < first["val_words"]
    assert min(last["val_code"], last["val_words"]) < last["val_loss"] and "val_bpb" in last


def test_vocabularies_that_differ_are_refused(tmp_path, texts):
    (tmp_path / "words" / "meta.json").unlink()
    prepare("words", tmp_path, str(tmp_path / "words.txt"), "char", say=lambda *words: None)
    done = run(tmp_path, "out")
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert "code+words: different vocabularies; make all with --tok" in done.stderr
