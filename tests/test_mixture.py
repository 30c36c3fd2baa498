"""examples/mixture.py: exact shares, a pure function of the place, and vocabularies that agree."""

import numpy as np
import pytest
from conftest import REPO, pydoc_text, stop_at

import train
from prepare_data import prepare

before = dict(vars(train))
from examples.mixture import BLOCK, SHARES, Mixture  # noqa: E402

vars(train).update(before)  # the other tests of this process have the plain train.py

MIXTURE = f"import runpy; runpy.run_path({str(REPO / 'examples/mixture.py')!r})\n"


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


@pytest.fixture
def texts(tmp_path):
    for name, text in (("code", pydoc_text()[:20_000]), ("words", pydoc_text()[-9000:])):
        (tmp_path / f"{name}.txt").write_text(text)
        prepare(name, tmp_path, str(tmp_path / f"{name}.txt"), "byte", say=lambda *words: None)
    return ("--dataset=code+words", f"--data_dir={tmp_path}")


def test_a_run_resumes_bit_for_bit_and_is_validated_on_each_text(run_train, texts):
    straight = run_train("straight", *texts, before=MIXTURE)
    assert straight.returncode == 0, straight.stderr
    run_train("stopped", *texts, before=MIXTURE + stop_at(5))
    done = run_train("stopped", *texts, before=MIXTURE)
    assert done.fingerprint(12) == straight.fingerprint(12)
    first, *_, last = straight.rows("eval")
    assert last["val_code"] < first["val_code"] and last["val_words"] < first["val_words"]
    assert min(last["val_code"], last["val_words"]) < last["val_loss"] and "val_bpb" in last


def test_vocabularies_that_differ_are_refused(run_train, texts, tmp_path):
    (tmp_path / "words" / "meta.json").unlink()
    prepare("words", tmp_path, str(tmp_path / "words.txt"), "char", say=lambda *words: None)
    done = run_train("run", *texts, before=MIXTURE)
    assert done.returncode == 2 and not done.out_dir.exists()
    assert "code+words: different vocabularies; make all with --tok" in done.stderr
