"""docs/forks.md: each of its forks keeps what the loop promises."""

import pytest
import run_page
import torch
from conftest import REPO, stop_at

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


def loaded(path):
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("fork", MORE, ids=["lora", "schedule_free", "regression"])
def test_a_fork_of_the_page_resumes_bit_for_bit(run_train, base, fork):
    flags = [*FLAGS, *MORE[fork]]
    straight = run_train("straight", *flags, before=fork)
    assert straight.returncode == 0, straight.stderr
    run_train("run", *flags, before=fork + stop_at(7))
    resumed = run_train("run", *flags, before=fork)
    assert resumed.returncode == 0 and "resumes from" in resumed.stdout, resumed.stderr
    assert resumed.fingerprint(12) == straight.fingerprint(12)
    losses = [row["val_loss"] for row in straight.rows("eval")]
    assert losses[-1] < losses[0]
    if fork == LORA:
        before, after = loaded(base)["model"], loaded(straight.checkpoint(12))["model"]
        moved = {name for name, weight in after.items() if not same(before, name, weight)}
        assert moved == {f"blocks.0.attention.qkv.{part}" for part in ("down", "up")}


def same(weights, name, weight):
    name = name.replace("qkv.linear.", "qkv.")
    return name in weights and torch.equal(weights[name], weight)


def test_best_holds_the_weights_that_were_judged(run_train):
    """The plain loop evaluates the averages of best.pt to the very loss on record."""
    done = run_train("run", *FLAGS, *MORE[SCHEDULE_FREE], before=SCHEDULE_FREE)
    best = min(done.rows("eval"), key=lambda row: row["val_loss"])
    saved = loaded(done.out_dir / "best.pt")
    assert not torch.equal(saved["ema"]["head.weight"], saved["model"]["head.weight"])
    judged = f"""
import torch
def build_model(config, vocab_size, inner=train.build_model):
    model = inner(config, vocab_size)
    model.load_state_dict(torch.load({str(done.out_dir / "best.pt")!r}, weights_only=True)["ema"])
    return model
train.build_model = build_model
"""
    again = run_train("again", "--max_steps=3", before=judged)
    assert again.rows("eval")[0]["val_loss"] == best["val_loss"]
