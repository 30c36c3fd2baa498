"""Several ranks are one run: one batch, one decision, one set of files. That they resume bit for bit,
and that torchrun passes signals on, is in test_resume.py."""

import re

import pytest
import torch
from conftest import torchrun
from sources import around, on_rank, script, stop_at

FLAGS = ("--log_interval=1", "--save_interval=4", "--keep_last=99")
SHARD = "--shard=true"


def assert_close(one, other):
    """The same steps, and losses and norms that differ by no more than the order of sums."""
    for a, b in zip(one.rows("train"), other.rows("train"), strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6, nan_ok=True)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert all(a[key] == b[key] for key in ("step", "sequences", "tokens", "lr", "epoch"))
    losses = [[row["val_loss"] for row in done.rows("eval")] for done in (one, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


# ---- one batch -----------------------------------------------------------------------------------

SPLITS = [
    (2, "--batch_size=4 --accum_steps=2"),  # as many micro-batches on each
    (3, "--batch_size=1 --accum_steps=8"),  # 2, 3 and 3
    (4, "--batch_size=8"),
    (2, SHARD),
]


@pytest.mark.parametrize("ranks, flags", SPLITS)
def test_any_number_of_ranks_takes_the_steps_of_one(run_train, once, ranks, flags):
    """With unequal numbers of micro-batches, too; and each rank draws dropout of its own."""
    note = """
held = getattr(run.wrapped, "module", run.model)
weight = plumbing.full_tensor(held.head.weight.detach()).double().sum().item()
noise = torch.rand(1).item()
os.write(1, f"REPLICA {run.state['step']} {weight!r} DREW {noise}\\n".encode())
"""
    note = around("train_step", then=note)
    done = run_train("run", *FLAGS, *flags.split(), ranks=ranks, before=note)
    assert_close(done, once(*FLAGS))
    assert done.rows("train") != once(*FLAGS).rows("train")  # they have shared the work
    replicas = re.findall(r"REPLICA (\d+ \S+) DREW (\S+)", done.stdout)
    weights, drawn = zip(*replicas, strict=True)
    assert len(weights) == 12 * ranks and len(set(weights)) == 12  # all hold the same weights
    assert len(set(drawn)) == 12 * ranks


def test_a_fork_may_choose_the_rows_of_a_batch_and_their_targets_on_any_number_of_ranks(run_train):
    """Also where no target of a rank counts."""
    source = "train.sequences_at = lambda step: 9 if step < 4 else 14\n"
    mask = (
        "if run.state['step'] == 5: args[2][: 7 if len(args[2]) == 14 or rank == 0 else 0] = -100"
    )
    source += around("train_step", mask)
    one, two = (run_train(f"of_{n}", *FLAGS, ranks=n, before=source) for n in (1, 2))
    assert_close(one, two)
    tokens = [row["tokens"] for row in two.rows("train")]
    assert tokens[5] - tokens[4] == 7 * 16


BRANCHES = """
class Branches(torch.nn.Module):
    # two heads, of which a rank's rows need one or the other
    def __init__(self, vocab_size):
        super().__init__()
        torch.manual_seed(1)
        self.body = torch.nn.Embedding(vocab_size, 8)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(8, vocab_size) for _ in "abc")
    def forward(self, inputs, targets):
        which = (inputs[:, :1] % 2).flatten()
        x = self.body(inputs)
        loss = 0
        for number in (0, 1):  # the third one never
            rows = which == number
            if rows.any():
                logits = self.heads[number](x[rows]).flatten(0, 1)
                nats = torch.nn.functional.cross_entropy(logits, targets[rows].flatten())
                loss = loss + nats * rows.float().mean()
        return loss
train.build_model = lambda config, vocab_size: Branches(vocab_size)
"""


def test_weights_that_some_ranks_leave_out_get_the_gradient_of_the_batch(run_train):
    flags = (*FLAGS, "--batch_size=2", "--weight_decay=0.5")
    one, two = (run_train(f"of_{n}", *flags, ranks=n, before=BRANCHES) for n in (1, 2))
    assert_close(one, two)
    begun, ended = (torch.load(two.checkpoint(step))["model"] for step in (0, 12))
    names = [f"heads.{n}.weight" for n in range(3)]
    moved = [not torch.equal(begun[name], ended[name]) for name in names]
    assert moved == [True, True, False]  # what no rank uses is not decayed either


UNSHARED = [  # flags, source of a fork, words
    ("--batch_size=1", "", "a batch of 1 sequences for 2 ranks: expected one or more"),
    (f"{SHARD} --batch_size=3", "", "with --shard=true as many for each"),
    ("", "train.sequences_at = lambda step: 3 if step < 4 else 1", "1 sequences for 2 ranks"),
]


@pytest.mark.parametrize("flags, source, words", UNSHARED)
def test_a_batch_that_the_ranks_cannot_share_is_one_line(run_train, flags, source, words):
    """Before anything is written, unless a fork asks for it in mid-run."""
    done = run_train("run", *flags.split(), ranks=2, before=source, code=2)
    assert done.stderr.count(words) == 1 and "Traceback" not in done.stderr
    assert done.out_dir.exists() == bool(source)


# ---- one decision --------------------------------------------------------------------------------

BATCH_NORM = script("sound/norms_batch")


@pytest.mark.parametrize("name, code", [("SIGTERM", 143), ("SIGKILL", None)])
def test_batch_norm_on_two_ranks_stopped_in_an_evaluation_resumes_exactly(run_train, name, code):
    """Its buffers are those of rank 0, and an evaluation moves none."""
    flags = (*FLAGS, "--eval_interval=3", "--batch_size=2", "--accum_steps=4")
    straight = run_train("straight", *flags, ranks=2, before=BATCH_NORM)
    within = f"if run.state['step'] == 6 and rank == 1: os.kill(os.getpid(), signal.{name})"
    source = BATCH_NORM + around("forward", f"if not torch.is_grad_enabled():\n    {within}")
    ended = run_train("run", *flags, ranks=2, before=source, code=code)
    assert [row["step"] for row in ended.rows("eval")] == [0, 3]
    done = run_train("run", *flags, ranks=2, before=BATCH_NORM)
    assert done.fingerprint() == straight.fingerprint() and done.rows() == straight.rows()
    model = torch.load(done.checkpoint(12))["model"]
    assert model["2.num_batches_tracked"] == 12 * 2  # passes of rank 0, training's alone


def test_what_rank_0_finds_decides_for_all(run_train):
    """A metric that differs between ranks: else one would stop early, and the other wait for it. A
    function in on_row, which only rank 0 calls."""
    own = """
values = iter([3.0, 2.5, 2.6, 2.7] if rank == 0 else [3.0, 2.0, 1.0, 0.5])
train.evaluate = lambda run: {"val_loss": next(values)}
"""
    done = run_train("run", "--eval_interval=2", "--patience=2", ranks=2, before=own)
    assert [row["val_loss"] for row in done.rows("eval")] == [3.0, 2.5, 2.6, 2.7]
    assert "stopped early" in done.stdout and done.facts["state"]["best_step"] == 2
    stop = """
def stop(run, row):
    if row["kind"] == "eval" and row["step"] == 4:
        run.stop("enough")
train.on_row.append(stop)
"""
    done = run_train("stopped", "--eval_interval=2", ranks=2, before=stop)
    assert done.facts["ended"] == "stopped: enough" and len(done.rows("train")) == 4


LOOK = """
def look(run, row):
    torch.rand(3)
    with train.evaluating(run):
        run.model(*train.batch_at(run, 0, 2))
train.on_row.append(look)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_on_row_draws_and_computes_moves_nothing(run_train, ranks):
    flags = "--dropout=0.2", "--log_interval=1"
    done = run_train("run", *flags, ranks=ranks, before=LOOK)
    assert done.fingerprint() == run_train("plain", *flags, ranks=ranks).fingerprint()


POISON = """
def poison(grad):
    return torch.full_like(grad, VALUE) if run_of[0].state["step"] >= 5 else grad
run_of = []
"""
PUT = around("build_parts", then="run_of.append(run); run.model.head.weight.register_hook(poison)")


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "momentum", "muon"])
def test_a_bad_gradient_of_one_rank_moves_nothing_on_any(run_train, name):
    """And ten in a row end all ranks."""
    value = "torch.inf" if name in ("adam", "muon") else "torch.nan"
    source = on_rank(1, POISON.replace("VALUE", value) + PUT)
    flags = ("--save_interval=1", f"--optimizer={name}", "--ema_decay=0.9", "--max_steps=20")
    done = run_train("run", *FLAGS, *flags, ranks=2, before=source, code=1)
    skipped = [row["step"] for row in done.rows("train") if row["skipped"]]
    assert skipped == [*range(6, 16)]
    first, last = done.fingerprint(5), done.fingerprint(14)
    assert all(first[part] == last[part] for part in ("model", "optimizer", "ema"))
    assert done.stderr.count("not finite") == 2 and "Traceback" not in done.stderr  # by each rank


# ---- one message ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, words", [("--n_head=3", "expected a multiple of 2"), ("--seed=2", "-> 2")]
)
def test_what_is_refused_is_said_once_and_every_rank_has_the_exit_code(run_train, flags, words):
    run_train("run", ranks=2, before=stop_at(6), code=143)
    done = run_train("run", flags, ranks=3, code=2)
    assert words in done.stderr and len(done.stderr.splitlines()) == 1
    assert not run_train("new", "--dataset=nowhere", ranks=2, code=2).out_dir.exists()


def test_an_error_of_one_rank_ends_the_others_with_a_message(run_train):
    fails = around("train_step", "if run.state['step'] == 5: raise ValueError('of mine')")
    done = run_train("run", *FLAGS, ranks=3, before=on_rank(1, fails), code=1)
    assert "ValueError: of mine" in done.stderr
    assert "another rank failed" in done.stderr and "the same command resumes" in done.stderr
    assert run_train("run", *FLAGS, ranks=3).events("resume")[0]["checkpoint"] == "ckpt_00000004.pt"


def test_the_launchers_code_is_not_0_after_bad_input(python_train):
    """By torchrun, whose ranks print no warning of DistributedDataParallel."""
    how = {"launcher": torchrun(2), "env": {"OMP_NUM_THREADS": "1"}}
    text = python_train("run", "--n_head=3", code=1, **how).output
    assert text.count("train.py: ") == 1 and re.search(r"exitcode +: 2", text)


def test_shards_hold_a_share_each_and_a_checkpoint_is_whole(run_train):
    held = r"""
weights = [*run.model.parameters()]
moments = [m for state in run.optimizer.state.values() for m in state.values() if m.ndim]
kinds = (weights, [w.grad for w in weights], moments)
held = [sum(plumbing.to_local(t).nbytes for t in kind) for kind in kinds]
os.write(1, f"HELD {held}\n".encode())
"""
    source, totals = around("train_step", then=held), {}
    for ranks, flags in ((1, []), (2, [SHARD])):
        done = run_train(f"of_{ranks}", "--max_steps=4", *flags, ranks=ranks, before=source)
        found = re.findall(r"HELD \[(\d+), (\d+), (\d+)\]", done.stdout)
        totals[ranks] = [[*map(int, each)] for each in found]
    for share in totals[2]:
        assert share == pytest.approx([n / 2 for n in totals[1][0]], rel=0.02)
    weight = torch.load(done.checkpoint(4))["model"]["head.weight"]
    assert weight.shape == (57, 32) and weight.isfinite().all()
