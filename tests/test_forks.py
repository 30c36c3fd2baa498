"""What a fork does to the loop: small changes, each of which keeps every promise or is refused.

A change is the source that a test runs before train.main(). The tests in test_hacks.py apply
patches."""

import random
import re

import numpy as np
import pytest
import torch
from helpers import batch, build_run, distance, gradient, update
from sources import AUGMENTED, LION, SHARD, around, at_step, only_on, ranks, stop_at
from torch import nn

from plumbing import checkpoint, data

FLAGS = ("--save_interval=4", "--eval_interval=3", "--keep_last=9")


def build(change):
    """Source that changes the model that build_model returns."""
    return "from torch import nn" + around("build_model", then="model = result\n" + change)


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


CHANGES = {  # several at once, where they do not replace each other
    "frozen, noisy": (FROZEN + NOISY, ("--n_layer=2", "--dropout=0.3")),
    "own generator, own optimizer": (OWN_GENERATOR + LION, ()),
    "augmented": (AUGMENTED, ("--num_workers=2", "--dropout=0.1")),
}


@pytest.mark.parametrize("names", CHANGES)
def test_stopped_and_resumed_it_ends_with_the_same_bits(names, straight_and_resumed):
    change, flags = CHANGES[names]
    flags = (*FLAGS, "--audit_interval=3", *flags)
    straight, _ = straight_and_resumed(*flags, step=7, before=change)
    assert not [row for row in straight.rows("event") if row["event"] in ("audit", "skipped")]


def test_augmentation_does_not_depend_on_workers_and_differs_with_seed_and_place(run_train):
    """Dropout draws from the same generators."""
    runs = [
        run_train(f"{number}", f"--num_workers={number}", "--dropout=0.1", before=AUGMENTED)
        for number in (0, 2)
    ]
    plain = run_train("plain", "--dropout=0.1")
    assert runs[0].fingerprint(12) == runs[1].fingerprint(12)
    assert runs[0].fingerprint(12)["rng"] == plain.fingerprint(12)["rng"]
    assert runs[0].fingerprint(12)["model"] != plain.fingerprint(12)["model"]
    reads = [data.Reader(Draws(), seed)[place] for seed in (1, 1, 2) for place in ((0, 2), (8, 2))]
    values = [x.tolist() for x, _ in reads]
    assert values[:2] == values[2:4] and values[4] not in values[:2] and values[0] != values[1]


class Draws:
    def __getitem__(self, place):
        draws = np.array([np.random.rand(), random.random(), torch.rand(1).item()])
        return np.tile(draws, (place[1], 1)), np.zeros(place[1])


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


MASK = build("""
def forward(x, y=None, usual=model.forward):
    if y is None:
        return usual(x)
    mask = (y != -100).float()
    losses = nn.functional.cross_entropy(
        usual(x).flatten(0, 1), y.clamp(min=0).flatten(), reduction="none"
    )
    return (losses * mask.flatten()).sum() / mask.sum()
model.forward = forward
""")
NO_TARGETS = around(
    "open_dataset",
    then="""
def masked(self, place, inner=train.ShuffledWindows.__getitem__):
    x, y = inner(self, place)
    y[:2] = -100  # all of a micro-batch of 2
    return x, y
train.ShuffledWindows.__getitem__ = masked
""",
)


def test_a_micro_batch_without_targets_counts_nothing_whatever_divides_the_loss(run_train):
    """A mean over a mask of no targets is NaN, and so would be its gradient."""
    split = ("--batch_size=2", "--accum_steps=4")
    own = run_train("own", *split, before=MASK + NO_TARGETS)
    usual = run_train("usual", *split, before=NO_TARGETS)
    for row, expected in zip(own.rows("train"), usual.rows("train"), strict=True):
        assert row["skipped"] == 0
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


# ---- what cannot be kept is refused --------------------------------------------------------------


def instead(name, value):
    return around(name, then=f"result = {value}")


def forward(with_targets, without="logits"):
    """The model returns these, made of its logits and its loss."""
    return build(f"""
def forward(x, y=None, usual=model.forward):
    logits = usual(x)
    if y is None:
        return {without}
    loss = usual(x, y)
    return {with_targets}
model.forward = forward
""")


def dataset(batch):
    """A dataset that returns this, made of x and y."""
    return f"""
import numpy as np
class Own(torch.utils.data.Dataset):
    own = np.random.default_rng(1)
    def __len__(self):
        return 64
    def __getitem__(self, place):
        first, count = place
        x = y = torch.arange(count * 16).view(count, 16) % 20
        return {batch}
""" + around("open_dataset", then="result = Own(), *result[1:]")


ALL_BUT_ONE = """
made = lambda model, name, lr, *rest: [torch.optim.AdamW([*model.parameters()][1:], lr)]
train.configure_optimizers = made
"""
NUMPYS = "import numpy; train.FRESH_STATE['best'] = numpy.float64(1)"
REFUSED = [  # (change, exit code, words of the one line); 2: before anything is written
    (instead("train_step", "result | {'lr': 1.0}"), 1, "train_step()['lr'] is a float; expected"),
    (instead("train_step", "result | {'own': torch.ones(3)}"), 1, "is a Tensor of shape (3,); exp"),
    (instead("train_step", "None"), 1, "train_step() is a NoneType; expected a dict with grad_"),
    (instead("evaluate", "result | {'step': 1}"), 1, "evaluate()['step'] is a int; expected a sca"),
    (instead("evaluate", "result['val_loss']"), 1, "evaluate() is a float; expected a dict with"),
    (forward("(logits, loss)"), 1, "model(inputs, targets) is a tuple; expected the mean loss"),
    (forward("(loss, {'loss': loss})"), 1, "model(inputs, targets) is a tuple; expected the mean"),
    (forward("loss.detach()"), 1, "is a Tensor of shape (); expected the mean loss, a scalar ten"),
    (forward("loss if model.training else (loss, {})"), 1, "targets) in eval mode is a tuple; exp"),
    (dataset("x[0], y[0]"), 1, "Own[0, 8] is a tuple; expected (inputs, targets), arrays or te"),
    (dataset("None"), 1, "Own[0, 8] is a NoneType; expected (inputs, targets), arrays or"),
    (dataset("x[first // 16 :], y"), 1, "Own[16, 8] is a tuple; expected (inputs, targets), a"),
    (dataset("x, y + self.own.integers(10**9)"), 1, "Own gives another first batch when it is"),
    (ALL_BUT_ONE, 2, "no optimizer trains "),
    (around("open_dataset", then="result[-1]['files'] = [train.cli.Path('f')]"), 2, "PosixPath"),
    (NUMPYS, 2, "['FRESH_STATE', 'best'] is a <class 'numpy.float64'>"),
]


@pytest.mark.parametrize("change, code, words", REFUSED)
def test_what_cannot_be_kept_is_refused_in_one_line(change, code, words, run_train):
    done = run_train("run", before=change, code=code)
    assert words in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    if code == 2:
        assert not done.out_dir.exists()
        return
    assert len(done.rows("train")) <= 2
    saved = list(done.out_dir.glob("*.pt"))
    assert ("sample.py" in done.stdout) == ("report.py" in done.stdout) == bool(saved)


def test_a_dataset_with_other_rows_is_another_one(run_train):
    cut = "result[0].tokens = result[0].tokens[:{}]"
    run_train("run", "--schedule=constant", before=around("open_dataset", then=cut.format(1000)))
    more = ("--schedule=constant", "--max_steps=20")
    done = run_train("run", *more, before=around("open_dataset", then=cut.format(900)), code=2)
    assert "rows changed from 61 to 55" in done.stderr


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
DIFFERING = [
    (INT_BUFFER, "seen", (SHARD,), 4),
    (NOISE_ON_ONE, "head.weight", (), 8),
    (RANKS_COUNT, "FRESH_STATE.mine", (), 4),
]


@pytest.mark.parametrize("change, name, flags, step", DIFFERING)
def test_what_differs_between_ranks_ends_the_run(change, name, flags, step, run_train):
    """At the first save that would hold it."""
    done = run_train("run", "--save_interval=4", *flags, before=ranks(2, change), code=1)
    assert re.search(f"at step {step} the ranks hold different bits in [^ ]*{name}", done.stderr)
    assert "Traceback" not in done.stderr and not done.checkpoint(step).exists()


# ---- hooks ---------------------------------------------------------------------------------------


HOOKS = """
calls = []
class Named(train.Hook):
    def __init__(self, name):
        self.name = name
    def begin(self, run):
        self.run = run
    def step(self, run, take, inputs, targets, lr):
        calls.append(f"{self.name}{run.state['step']}")
        return take()
    def row(self, row, is_kept):
        if row["kind"] == "train":
            calls.append(f"{self.name}{'+' if is_kept else '-'}")
    def end(self, run, ended):
        print("CALLS", *calls, ended, flush=True)
train.hooks.append(Named("a"))
inner = train.main
train.main = lambda: inner(hooks=[Named("b")])
"""


def test_later_hooks_wrap_earlier_ones_in_the_two_steps_after_a_stop_too(run_train):
    flags = ("--save_interval=4", "--log_interval=1", "--audit_interval=1")
    done = run_train("run", *flags, before=HOOKS + stop_at(2), code=143)
    words = "b0 a0 a+ b+ b1 a1 a+ b+ b2 a2 a- b- b3 a3 a- b- stopped by SIGTERM"
    assert [line for line in done.stdout.splitlines() if "CALLS" in line] == [f"CALLS {words}"] * 2


RAISING = """
class StopIt(Exception):
    pass
def row(self, row, is_kept):
    assert threading.current_thread() is threading.main_thread()
    if row.get("{field}") == {value}:
        raise StopIt
import threading
train.Hook.row = row
"""


@pytest.mark.parametrize("field, value", [("step", 5), ("event", "'saved'"), ("event", "'end'")])
def test_an_exception_of_a_hook_ends_the_run_once(field, value, run_train):
    source = HOOKS.replace("def row", "def _") + RAISING.format(field=field, value=value)
    done = run_train("run", "--log_interval=1", "--save_interval=4", before=source, code=1)
    assert done.stderr.count("Traceback") == 1 and done.stdout.count("CALLS") == 2
    names = [row["event"] for row in done.rows("event")]
    assert names.count("end") == 1 and "save_failed" not in names
    ended = "finished" if value == "'end'" else "failed: StopIt"
    assert done.facts["ended"] == ended and done.rows("event")[-1]["ended"] == ended


def test_a_hook_ends_three_ranks_together(run_train, tmp_path):
    source = """
class Enough(train.Hook):
    def begin(self, run):
        self.run = run
    def row(self, row, is_kept):  # on rank 0 alone
        if row.get("step") == 4:
            self.run.stop_with = "enough", 7
    def end(self, run, ended):
        with open(f"ended_{rank}", "w") as file:
            file.write(f"{ended} {run.state['step']}")
train.hooks.append(Enough())
"""
    done = run_train("run", "--log_interval=1", before=ranks(3, source), code=7)
    assert "CODES 7 7 7" in done.stdout, done.stdout
    assert [(tmp_path / f"ended_{n}").read_text() for n in range(3)] == ["enough 5"] * 3
    assert done.checkpoint(5).exists() and done.facts["ended"] == "enough"
