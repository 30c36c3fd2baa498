"""The examples, and the forks of docs/forks.md: each does what it is for, and what the loop promises
holds for it, too."""

import contextlib
import subprocess
import sys

import numpy as np
import pytest
import run_page
import torch
from conftest import REPO, make_dataset, pydoc_text
from sources import around

import train

before = dict(vars(train))
from examples import ledger  # noqa: E402
from examples.mixture import BLOCK, SHARES, Mixture  # noqa: E402
from plumbing.cli import BadInput  # noqa: E402

vars(train).update(before)  # the other tests of this process have the plain train.py


def loaded(path):
    return torch.load(path, weights_only=True)


# ---- examples/images.py: the loop does not know what it trains, and buffers are safe, too ----------

EXAMPLE = REPO / "examples" / "images.py"
IMAGES = f"import sys; sys.path.insert(0, {str(EXAMPLE.parent)!r}); import images\n"
RUN = "--dataset=images --block_size=1 --max_steps=24 --save_interval=5 --keep_last=9".split()
RUN += "--dropout=0.2 --ema_decay=0.9 --eval_tokens=100".split()
NOT_A_NUMBER = """
def draw(self, batch, inner=images.Images.__getitem__):
    images, labels = inner(self, batch)
    if batch == (80, 8):  # the batch of step 11
        images[3] = math.nan
    return images, labels
images.Images.__getitem__ = draw
"""


def test_images_resume_bit_for_bit_with_buffers_and_dropout(straight_and_resumed):
    whole, _ = straight_and_resumed(*RUN, step=18, last=24, before=IMAGES)
    model = loaded(whole.checkpoint(24))["model"]
    (tracked,) = {int(weight) for name, weight in model.items() if "tracked" in name}
    assert tracked == 24, "each step, and nothing else, moved the buffers once"


def test_a_skipped_batch_leaves_weights_moments_and_buffers_as_they_were(run_train):
    flags = [*RUN, "--max_steps=11", "--schedule=constant", "--warmup_steps=0"]
    done = run_train("run", *flags, before=IMAGES + NOT_A_NUMBER)
    assert [row["step"] for row in done.rows("train") if row["skipped"]] == [11]
    before, after = done.fingerprint(10), done.fingerprint(11)
    assert before.pop("state") != after.pop("state")
    assert before.pop("rng") != after.pop("rng"), "dropout was drawn"
    assert before == after
    healthy = run_train("healthy", *flags, before=IMAGES)
    assert healthy.fingerprint(10)["model"] == before["model"] != healthy.fingerprint(11)["model"]


def test_images_are_learned_from_any_directory_and_get_a_report(tmp_path):
    flags = ["--max_steps=120", "--device=cpu", "--dtype=float32", f"--out_dir={tmp_path}/out"]
    done = subprocess.run(
        [sys.executable, EXAMPLE, *flags], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    accuracy = float(done.stdout.rpartition("accuracy ")[2].partition("%")[0])
    assert accuracy > 60, "chance is 10"
    assert "accuracy" in (tmp_path / "out" / "report.md").read_text()


# ---- examples/mixture.py: exact shares, a pure function of the place ------------------------------

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
        make_dataset(tmp_path, name, text, "byte")
    return ("--dataset=code+words", f"--data_dir={tmp_path}")


def test_a_mixture_resumes_bit_for_bit_and_is_validated_on_each_text(straight_and_resumed, texts):
    straight, _ = straight_and_resumed(*texts, step=5, name="SIGTERM", before=MIXTURE)
    first, *_, last = straight.rows("eval")
    assert last["val_code"] < first["val_code"] and last["val_words"] < first["val_words"]
    assert min(last["val_code"], last["val_words"]) < last["val_loss"] and "val_bpb" in last


def test_a_ledger_has_a_copy_of_the_code_for_each_patch_that_applies(tmp_path, monkeypatch):
    patch = tmp_path / "idea.patch"
    for line in ("no line", "no line", (REPO / "LICENSE").read_text().splitlines()[0]):
        patch.write_text(f"--- a/LICENSE\n+++ b/LICENSE\n@@ -1 +1 @@\n-{line}\n+another\n")
        with (
            pytest.raises(BadInput, match="apply")
            if line == "no line"
            else contextlib.nullcontext()
        ):
            assert (ledger.patched(patch, tmp_path) / "LICENSE").read_text()[:8] == "another\n"
    words = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: words.extend(command))
    with contextlib.suppress(FileNotFoundError):
        ledger.last_loss(tmp_path, tmp_path / "0", 0)
    assert words.index("config/shakespeare_fast.py") < words.index(f"--out_dir={tmp_path / '0'}")


# ---- docs/forks.md -------------------------------------------------------------------------------

LORA, SCHEDULE_FREE, REGRESSION = (
    code.partition("flags = ")[0]
    for _, _, language, _, code in run_page.blocks(REPO / "docs/forks.md")
    if language == "python"
)
FLAGS = ["--max_steps=12", "--save_interval=4", "--eval_interval=4", "--audit_interval=5"]
MORE = {LORA: [], SCHEDULE_FREE: ["--ema_decay=0.9", "--schedule=constant"], REGRESSION: []}


@pytest.fixture
def base(run_train):
    return run_train("out/base", "--max_steps=6").out_dir / "best.pt"


@pytest.mark.parametrize("fork", MORE, ids=["lora", "schedule_free", "regression"])
def test_a_fork_of_the_page_resumes_bit_for_bit(straight_and_resumed, base, fork):
    straight, _ = straight_and_resumed(*FLAGS, *MORE[fork], step=7, name="SIGTERM", before=fork)
    losses = [row["val_loss"] for row in straight.rows("eval")]
    assert losses[-1] < losses[0]
    if fork == LORA:
        before, after = loaded(base)["model"], loaded(straight.checkpoint(12))["model"]
        after = {name.replace("qkv.linear.", "qkv."): weight for name, weight in after.items()}
        new = {f"blocks.0.attention.qkv.{part}" for part in ("down", "up")}
        assert after.keys() - before.keys() == new
        assert all(torch.equal(before[name], after[name]) for name in after.keys() - new)


def test_best_holds_the_weights_that_were_judged(run_train):
    """The plain loop evaluates the averages of best.pt to the very loss on record."""
    done = run_train("run", *FLAGS, *MORE[SCHEDULE_FREE], before=SCHEDULE_FREE)
    best = min(done.rows("eval"), key=lambda row: row["val_loss"])
    saved = loaded(done.out_dir / "best.pt")
    assert not torch.equal(saved["ema"]["head.weight"], saved["model"]["head.weight"])
    best_pt = str(done.out_dir / "best.pt")
    load = f"result.load_state_dict(torch.load({best_pt!r}, weights_only=True)['ema'])"
    again = run_train("again", "--max_steps=3", before=around("build_model", then=load))
    assert again.rows("eval")[0]["val_loss"] == best["val_loss"]
