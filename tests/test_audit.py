"""The audit: a step that was not computed exactly is found, named and healed; and it disturbs
nothing."""

import functools
import math

import pytest
import torch
from conftest import digest, events, first
from helpers import batch, moving_run
from sources import MEASURED, around, only_on, ranks

import train
from plumbing import audit

FLAGS = ("--dropout=0.1", "--ema_decay=0.9", "--grad_clip=0", "--log_interval=1")
AUDIT = "--audit_interval=3"
STEPS = 12


def flip_gradient(tries, step=6):
    """Source for run_train's `before`: in these tries of that step a gradient has a wrong bit."""
    tensor = "train.ranks.local_tensor(run.model.head.weight.grad)"
    return flip("forward_backward", tensor, tries, step)


def flip_weight(tries, step=6):
    """The same with a weight, after the step: what other ranks do not see."""
    return flip("train_step", "run.model.head.weight.data", tries, step)


def flip(name, tensor, tries, step):
    bad = f"""
if run.state["step"] + 1 == {step}:
    tries.append(1)
    if len(tries) in {tries}:
        {tensor}.view(torch.int32)[3, 4] ^= 1 << (20 + len(tries))
"""
    return "tries = []\n" + around(name, then=bad)


@pytest.fixture
def plain(once):
    """The run without a fault, and without the audit."""
    return once(*FLAGS)


# ---- a fault -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number, odd", first(1, [(1, "first"), (2, "second")]))
def test_one_flipped_bit_is_found_at_its_step_named_and_healed(run_train, plain, number, odd):
    """Also where it is the repeat that is wrong."""
    done = run_train("run", *FLAGS, AUDIT, before=flip_gradient([number]))
    assert done.fingerprint(STEPS) == plain.fingerprint(STEPS)
    (event,) = events(done, "audit")
    assert (event["step"], event["odd"]) == (6, odd)
    named = {name for name in event["tensors"] if name.startswith("gradient/")}
    assert named == {"gradient/head.weight"} and "weights/head.weight" in event["tensors"]
    line = next(line for line in done.stdout.splitlines() if line.startswith("      6 audit: "))
    assert f"odd {odd}" in line
    losses = [[row["loss"] for row in run.rows("train")] for run in (done, plain)]
    assert losses[0] == losses[1]
    # control: an audit that is due at other steps does not see it
    other = run_train("other", *FLAGS, "--audit_interval=4", before=flip_gradient([1]))
    assert events(other, "audit") == []
    assert other.fingerprint(STEPS)["model"] != plain.fingerprint(STEPS)["model"]


def test_three_different_results_end_the_run_with_a_diagnosis(run_train):
    done = run_train("run", *FLAGS, AUDIT, before=flip_gradient([1, 2]), code=1)
    assert "Traceback" not in done.stderr
    assert "step 6 gave other results when it was repeated" in done.stderr
    assert "check.py --only=exact" in done.stderr
    assert done.facts["ended"].startswith("failed: step 6 gave other results")


@pytest.mark.parametrize(
    "fault, shard",
    first(1, [(flip_gradient, "true"), (flip_gradient, "false"), (flip_weight, "false")]),
    ids=["gradient, sharded", "gradient", "weight"],
)
def test_a_fault_on_one_rank_is_healed_on_all(run_train, fault, shard):
    """A gradient reaches all ranks in its sum. A weight, or a share of a sharded gradient, stays
    where it is, and only that rank knows."""
    flags = (*FLAGS, f"--shard={shard}")
    straight = run_train("straight", *flags, before=ranks(2))
    done = run_train("run", *flags, AUDIT, before=ranks(2, only_on(1, fault([1]))))
    assert done.fingerprint(STEPS) == straight.fingerprint(STEPS)
    (event,) = events(done, "audit")
    assert (event["step"], event["odd"]) == (6, "first")
    assert "weights/head.weight" in event["tensors"]


# ---- no fault ------------------------------------------------------------------------------------


def take_steps(run, audited, bad_step=None):
    """Five steps; digest of all that they left. In bad_step the loss is not finite."""
    for seed in range(5):
        model = run.model
        if seed == bad_step:
            model = lambda x, y: run.model(x, y) * math.nan  # noqa: E731
        take = functools.partial(train.train_step, model, run, *batch(seed=seed), 1e-3)
        numbers = audit.repeated(run, take, most=3) if audited else take()
        assert numbers["skipped"] == (seed == bad_step)
    optimizers = [optimizer.state_dict() for optimizer in run.optimizers]
    return digest([run.model.state_dict(), run.ema, optimizers, torch.get_rng_state(), run.state])


@pytest.mark.parametrize("bad_step", [None, 0, 2])
@pytest.mark.parametrize("optimizer", ["adamw", "muon", "momentum", "by hand"])
def test_the_audit_changes_no_bit_of_buffers_or_of_any_optimizer(knobs, optimizer, bad_step):
    """With what a step makes lazily: moments, counters in param_groups; skipped steps, too."""
    knobs(ema_decay=0.9)
    plain, audited = (take_steps(moving_run(optimizer), on, bad_step) for on in (False, True))
    assert audited == plain


# ---- the second step: state that no checkpoint holds ---------------------------------------------

HIDDEN = {
    "a counter of a module": """
def forward(self, x, inner=train.build_model.__globals__["MLP"].forward):
    self.calls = getattr(self, "calls", 0) + 1
    return inner(self, x) * (1 + 1e-3 * self.calls)
train.build_model.__globals__["MLP"].forward = forward
""",
    "a mean in a global": "means = [torch.zeros(())]\n"
    + around(
        "forward_backward",
        then="""
        means.append(0.9 * means[-1] + 0.1 * result["loss"].detach())
        result["loss"] = means[-1]
        """,
    ),
}


@pytest.mark.parametrize("before", HIDDEN.values(), ids=HIDDEN)
def test_state_that_no_checkpoint_holds_ends_the_run_at_its_second_step(run_train, before):
    done = run_train("run", before=before, code=1)
    assert "step 2 gave other results" in done.stderr
    assert "--audit_interval=-1" in done.stderr and len(done.stderr.splitlines()) == 1
    run_train("without", "--audit_interval=-1", before=before)


NO_STATE = [HIDDEN["a counter of a module"].replace("1e-3 *", "0.0 *"), MEASURED]


@pytest.mark.parametrize("before", NO_STATE, ids=["a counter that only prints", "milliseconds"])
def test_what_changes_no_result_is_no_state_of_the_training(run_train, once, before):
    done = run_train("run", AUDIT, before=before)
    assert done.fingerprint(STEPS) == once().fingerprint(STEPS) and not events(done, "audit")


def test_the_second_step_changes_no_bit_and_no_figure(run_train, plain):
    without = run_train("run", *FLAGS, "--audit_interval=-1")
    assert without.fingerprint(STEPS) == plain.fingerprint(STEPS)
    seconds = plain.facts["seconds"]
    assert seconds["audit"] > 0
    memory = [run.rows("train")[-1]["mem_gb"] for run in (plain, without)]
    assert memory[0] == pytest.approx(memory[1], rel=0.05)


def test_an_audit_that_could_prove_nothing_is_refused(run_train):
    refused = run_train("run", AUDIT, "--deterministic=false", code=2)
    assert not refused.out_dir.exists()
    assert "--audit_interval=3: expected deterministic mode" in refused.stderr
