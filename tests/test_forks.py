"""What a fork does to the loop: small changes, each of which keeps every promise or is refused.

A change is the source that a test runs before train.main(). The tests in test_hacks.py apply
patches."""

import re

import pytest
from conftest import first
from helpers import batch, build_run, distance, gradient, update
from sources import LION, SHARD, around, at_step, only_on, ranks
from torch import nn

from plumbing import checkpoint

FLAGS = ("--save_interval=4", "--eval_interval=3", "--keep_last=9")


def build(change):
    """Source that changes the model that build_model returns."""
    return "from torch import nn" + around("build_model", then="model = result\n" + change)


def optimize(change):
    """Source that changes the optimizers that configure_optimizers returns."""
    return around("configure_optimizers", then="optimizers = result\n" + change)


# Half of the model is frozen, and in eval mode: its dropout is off.
FROZEN = build("model.blocks[0].requires_grad_(False).eval()")

# A model that draws random numbers, also in evaluation: torch's, and Python's.
NOISY = build("""
import random
model.dropout.forward = lambda x: x + 0.01 * random.random() * torch.randn_like(x)
""")

# Dropout with a generator of its own, saved in torch's way.
OWN_GENERATOR = build("""
class OwnDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)
    def forward(self, x):
        return x * torch.empty_like(x).bernoulli_(0.9, generator=self.generator)
    def get_extra_state(self):
        return {"generator": self.generator.get_state(), "words": "any"}
    def set_extra_state(self, state):
        self.generator.set_state(state["generator"])
model.dropout = OwnDropout()
""")


# An optimizer with a number of its own in its state_dict.
OWN_KEY = optimize("""
(optimizer,) = optimizers
optimizer.count = 0
def save(optimizer, saved):
    saved["count"] = optimizer.count
def load(optimizer, saved):
    optimizer.count = saved["count"]
def step(optimizer, *rest):
    optimizer.count += 1
    for group in optimizer.param_groups:
        group["lr"] /= optimizer.count
optimizer.register_state_dict_post_hook(save)
optimizer.register_load_state_dict_pre_hook(load)
optimizer.register_step_pre_hook(step)
""")


RANDOM_BATCHES = """
def random_rows(self, batch):  # of a part of the text, as nanoGPT draws them
    starts = torch.randint(1000 - self.block_size, (batch[1],)).numpy()
    rows = train.data.read_rows(self.tokens[:1000], starts, self.block_size + 1)
    return rows[:, :-1].copy(), rows[:, 1:].copy()
train.ShuffledWindows.__getitem__ = random_rows
"""

CHANGES = {  # several at once, where they do not replace each other
    "frozen, noisy, own key": (FROZEN + NOISY + OWN_KEY, ("--n_layer=2", "--dropout=0.3")),
    "own generator, own optimizer": (OWN_GENERATOR + LION, ()),
    "random batches": (RANDOM_BATCHES, ()),
}


@pytest.mark.parametrize("names", CHANGES)
def test_stopped_and_resumed_it_ends_with_the_same_bits(names, straight_and_resumed):
    change, flags = CHANGES[names]
    flags = (*FLAGS, "--audit_interval=3", *flags)
    straight, _ = straight_and_resumed(*flags, step=7, before=change)
    assert not [row for row in straight.rows("event") if row["event"] in ("audit", "skipped")]


# ---- masked targets ------------------------------------------------------------------------------


def masked_batch(rows=8):
    """Inputs, and targets of which each row has another number: the first one has none for an extra
    head, the last two have none at all."""
    inputs, targets = batch(rows)
    for row in range(rows):
        targets[row, : 2 * row + 1] = -100
    targets[0] = -100
    targets[0, 0] = 7
    targets[-2:] = -100
    return inputs, targets


@pytest.mark.parametrize("micro_batch", [4, 3, 2, 1])
def test_the_loss_is_the_mean_however_it_is_split(micro_batch, knobs):
    whole = build_run(rows=8)
    parts = build_run(rows=8)
    parts.state["micro_batch"] = micro_batch
    inputs, targets = masked_batch()
    logits = whole.model(inputs).detach()[targets != -100]
    expected = nn.functional.cross_entropy(logits, targets[targets != -100]).item()
    assert update(whole, inputs, targets)["loss"] == pytest.approx(expected, rel=1e-6)
    found = update(parts, inputs, targets)
    assert (found["loss"], found["skipped"]) == (pytest.approx(expected, rel=1e-6), 0)
    assert distance(gradient(parts), gradient(whole)) < 1e-5


# ---- what cannot be kept is refused --------------------------------------------------------------


def returns(name, field, value):
    return around(name, then=f"result['{field}'] = {value}")


ALL_BUT_ONE = """
made = lambda model, name, lr, *rest: [torch.optim.AdamW([*model.parameters()][1:], lr)]
train.configure_optimizers = made
"""
OTHER_WEIGHT = "{'params': [torch.zeros(2, requires_grad=True)]}"
NUMPYS = "import numpy; train.FRESH_STATE['best'] = numpy.float64(1)"
REFUSED = [  # (change, exit code, words of the one line); 2: before anything is written
    (returns("train_step", "lr", "torch.ones(())"), 1, "train_step() returns a number named lr"),
    (
        returns("train_step", "own", "torch.ones(3)"),
        1,
        "own, a Tensor of 3 numbers; expected a scalar",
    ),
    (returns("forward_backward", "epoch", "torch.ones(())"), 1, "model returns a number named epo"),
    (returns("evaluate", "step", "1"), 1, "evaluate() returns a number named step"),
    (returns("evaluate", "own", "torch.ones(2)"), 1, "evaluate() returns own, a Tensor"),
    (returns("train_step", "own", "[1.0, 2.0]"), 1, "returns own, a list of 2 numbers; expected"),
    (optimize(f"optimizers[0].add_param_group({OTHER_WEIGHT})"), 2, "is not in model.parameters()"),
    (ALL_BUT_ONE, 2, "no optimizer trains "),
    (around("open_dataset", then="result[-1]['files'] = [train.cli.Path('f')]"), 2, "PosixPath"),
    (NUMPYS, 2, "['FRESH_STATE', 'best'] is a <class 'numpy.float64'>"),
    ("train.FRESH_STATE['best'] = [{'x': range(3)}]", 2, "range"),
]


@pytest.mark.parametrize("change, code, words", REFUSED)
def test_what_cannot_be_kept_is_refused_in_one_line(change, code, words, run_train):
    done = run_train("run", before=change, code=code)
    assert words in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert not done.rows("train") if code == 1 else not done.out_dir.exists()


def test_the_warm_up_pass_counts_for_nothing(run_train):
    count = around("forward_backward", "run.state['seen'] += len(args[2])")
    done = run_train("run", before="train.FRESH_STATE['seen'] = 0\n" + count)
    assert checkpoint.load(done.checkpoint(12))["state"]["seen"] == 12 * 8


def test_train_step_may_return_plain_numbers_and_large_counts(run_train):
    more = "{'plain': 0.1, 'whole': 3, 'one': torch.ones(1), 'large': torch.tensor(2**24 + 1)}"
    done = run_train("run", before=around("train_step", then=f"result |= {more}"))
    row = done.rows("train")[-1]
    assert [row[name] for name in ("plain", "whole", "one", "large")] == [0.1, 3, 1, 2**24 + 1]


# ---- the rest ------------------------------------------------------------------------------------


INT_BUFFER = build("""
model.register_buffer("seen", torch.zeros(1, dtype=torch.int64))
def count(module, args):
    module.seen += args[0].sum()
model.register_forward_pre_hook(count)
""")
MINE = "run.state['mine'] = run.state.get('mine', 0) + int(args[1].sum())"
RANKS_COUNT = around("count_batch", MINE)
NOISE_ON_ONE = only_on(1, at_step(6, "run.model.head.weight.data[0, 0] += 1e-6"))
OF_RANK = OWN_GENERATOR.replace("manual_seed(1)", "manual_seed(train.rank())")
DIFFERING = [
    (INT_BUFFER, "seen", (SHARD,), 4),
    (NOISE_ON_ONE, "head.weight", (), 8),
    (RANKS_COUNT, "FRESH_STATE.mine", (), 4),
    (INT_BUFFER, "seen", (), 4),
    (OF_RANK, "generator", (), 0),
]


@pytest.mark.parametrize("change, name, flags, step", first(3, DIFFERING))
def test_what_differs_between_ranks_ends_the_run(change, name, flags, step, run_train):
    """At the first save that would hold it."""
    done = run_train("run", "--save_interval=4", *flags, before=ranks(2, change), code=1)
    assert re.search(f"at step {step} the ranks hold different bits in [^ ]*{name}", done.stderr)
    assert "Traceback" not in done.stderr and not done.checkpoint(step).exists()
