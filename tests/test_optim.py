"""What optim.py promises: one optimizer, what decays, and Muon. That a skip moves nothing: test_loop."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from test_model import build
from torch import nn

from optim import Muon, configure_optimizer, orthogonal

KNOBS = {"peak_lr": 0.1, "weight_decay": 0.5, "beta1": 0.9, "beta2": 0.95, "momentum": 0.9}
each_optimizer = pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "momentum", "muon"])


class Recurrent(nn.Module):
    """Not a GPT: parameters of every kind, and no attribute that a GPT has."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(65, 16)
        self.conv = nn.Conv1d(16, 16, 1)
        self.gru = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 65)

    def forward(self, inputs, targets):
        logits = self.head(self.gru(self.conv(self.token(inputs).mT).mT)[0])
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def configure(model, name, device_type="cpu"):
    return configure_optimizer(model, KNOBS | {"optimizer": name}, device_type)


def weights_of(optimizer):
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def copies(weights):
    return [weight.detach().clone() for weight in weights]


def step(optimizer, gradient=1.0):
    """With the same gradient in each element; 0: nothing but weight decay."""
    for weight in weights_of(optimizer):
        weight.grad = torch.full_like(weight, gradient) if weight.requires_grad else None
    optimizer.step()


@each_optimizer
@pytest.mark.parametrize("make", [build, Recurrent])
def test_weight_decay_falls_on_matrices_only(make, name):
    """Each weight has one group. One that is frozen does not decay either."""
    model = make()
    model.head.weight.requires_grad_(False)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = configure(model, name)
    assert sorted(map(id, weights_of(optimizer))) == sorted(map(id, model.parameters()))
    step(optimizer, 0.0)
    groups = {id(w): group for group in optimizer.param_groups for w in group["params"]}
    for place, weight in model.named_parameters():
        lr = groups[id(weight)]["lr"]
        shrunk = before[place] * (1 - lr * 0.5)
        if name == "adam":  # its decay goes through the moments, which make one size of all
            shrunk = before[place] - lr * before[place] / (before[place].abs() + 2e-8)
        decays = weight.ndim > 1 and weight.requires_grad
        expected = shrunk if decays else before[place]
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-4, atol=1e-4)


def test_muon_takes_hidden_matrices_and_leaves_embeddings_and_heads_to_adamw():
    def taken(model):
        groups = configure(model, "muon").param_groups
        names = {id(weight): name for name, weight in model.named_parameters()}
        return {names[id(w)]: g for g in groups for w in g["params"]}

    gpt, recurrent = taken(build()), taken(Recurrent())
    hidden = {name for name in gpt if "momentum" in gpt[name]}
    assert hidden == {name for name in gpt if "blocks." in name}
    rates = {name: gpt[name]["lr"] for name in gpt if name not in hidden}
    assert rates == {"embedding.token.weight": 0.2, "head.weight": 0.05}
    hidden = {name for name in recurrent if "momentum" in recurrent[name]}
    assert hidden == {"gru.weight_ih_l0", "gru.weight_hh_l0", "head.weight"}
    taken(nn.Sequential(nn.Embedding(5, 4)))  # none to take is no error


def muon(weights, parts=1):
    how = {"lr": 0.1, "weight_decay": 0.5, "fused": True}
    groups = [{"params": weights, "momentum": 0.9, "parts": [parts] * len(weights)}]
    optimizer = Muon(groups, **how)
    for weight in weights:
        optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    return optimizer


@pytest.mark.parametrize("emulated", [False, True])
def test_muon_takes_the_steps_of_torchs_own(emulated, monkeypatch):
    """Where bfloat16 is only emulated, in float32: the same but for bfloat16's rounding."""
    monkeypatch.setattr("optim.emulates_bfloat16", lambda device: emulated)
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in ((20, 8), (8, 24), (8, 8))]
    theirs = [nn.Parameter(weight) for weight in copies(ours)]
    knobs = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.5, "adjust_lr_fn": "match_rms_adamw"}
    pair = muon(ours), torch.optim.Muon(theirs, **knobs)
    for _ in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        for optimizer in pair:
            optimizer.step()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other) or emulated
        torch.testing.assert_close(mine, other, rtol=0, atol=0.01)
    square = orthogonal(torch.randn(16, 16))
    assert square.dtype == (torch.float32 if emulated else torch.bfloat16)
    assert torch.linalg.svdvals(square.float()).sub(1).abs().median() < 0.3


def test_muon_orthogonalizes_each_part_that_the_model_names():
    """Attention's q, k and v in one step as they would as three matrices; torch's Muon differs."""
    torch.manual_seed(0)
    weights, gradients = torch.randn(2, 3, 8, 8)

    def stepped(make, weights, gradients):
        weights = [nn.Parameter(weight.clone()) for weight in weights]
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.clone()
        make(weights).step()
        return torch.cat(copies(weights))

    whole = [weights.view(24, 8)], [gradients.view(24, 8)]
    alone = stepped(muon, weights, gradients)
    assert torch.equal(stepped(partial(muon, parts=3), *whole), alone)
    assert not torch.allclose(stepped(muon, *whole), alone, atol=0.01)  # control
    (group,) = (g for g in configure(build(), "muon").param_groups if "momentum" in g)
    stacked = [w for w, n in zip(group["params"], group["parts"], strict=True) if n == 3]
    assert [tuple(w.shape) for w in stacked] == [(96, 32)] * 2


@each_optimizer
@pytest.mark.parametrize(("device_type", "fused"), [("cpu", True), ("cuda", True), ("mps", False)])
def test_kernels_that_honour_a_skip_are_used_where_there_are_any(name, device_type, fused):
    """MPS's fused kernels ignore found_inf."""
    optimizer = configure(build(), name, device_type)
    assert getattr(optimizer, "_step_supports_amp_scaling", False) == fused
