"""What optim.py promises: who owns which weight, what decays, and that Muon skips without
waiting."""

from functools import partial

import pytest
import torch
from helpers import Recurrent, build, build_trained
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from optim import Muon, configure_optimizers, orthogonal

OPTIMIZERS = ("adamw", "adam", "sgd", "momentum", "muon")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["GPT", "another module"])
def test_weight_decay_falls_on_matrices_only(kind, optimizer):
    """With no gradient, a step is nothing but weight decay."""
    model = build_trained() if kind == "GPT" else Recurrent()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizers = configure_optimizers(model, optimizer, 0.1, 0.5, 0.9, 0.95, 0.9, "cpu")
    owned = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    assert sorted(map(id, owned)) == sorted(map(id, model.parameters()))
    for o in optimizers:
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        o.step()
    for name, p in model.named_parameters():
        decays = p.ndim > 1 and name != "embedding.conv"
        shrunk = before[name] * (1 - 0.1 * 0.5)
        if optimizer == "adam":  # its decay goes through the moments, which make one size of all
            shrunk = before[name] - 0.1 * before[name] / (before[name].abs() + 2e-8)
        expected = shrunk if decays else before[name]
        torch.testing.assert_close(p.detach(), expected, msg=name, rtol=1e-4, atol=1e-4)


def test_muon_takes_hidden_matrices_and_leaves_embeddings_to_adamw():
    def taken(model):
        muon, adamw = configure_optimizers(model, "muon", 1e-3, 0.1, 0.9, 0.95, 0.9, "cpu")
        names = {id(p): name for name, p in model.named_parameters()}
        return {names[id(p)] for p in muon.param_groups[0]["params"]}

    gpt = build()
    assert taken(gpt) == {name for name, _ in gpt.named_parameters() if "blocks." in name}
    assert taken(Recurrent()) == {"gru.weight_ih_l0", "gru.weight_hh_l0", "head.weight"}
    list(taken(nn.Sequential(nn.Embedding(5, 4))))  # none to take is no error


@pytest.mark.parametrize("emulated", [False, True])
def test_muon_takes_the_steps_of_torchs_own(emulated, monkeypatch):
    """Where bfloat16 is only emulated, in float32: the same but for bfloat16's rounding."""
    monkeypatch.setattr("optim.emulates_bfloat16", lambda device: emulated)
    torch.manual_seed(0)
    shapes = ((20, 8), (8, 24), (8, 8))
    ours = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = [nn.Parameter(weight.detach().clone()) for weight in ours]
    knobs = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.5}
    pair = Muon(ours, **knobs), torch.optim.Muon(theirs, **knobs, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        for optimizer in pair:
            optimizer.step()
    same = [torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True)]
    assert same == [not emulated] * 3
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0.01)
    square = orthogonal(torch.randn(16, 16))
    assert square.dtype == (torch.float32 if emulated else torch.bfloat16)
    assert torch.linalg.svdvals(square.float()).sub(1).abs().median() < 0.3
    with FlopCounterMode(display=False) as counter:
        pair[0].step()
    assert counter.get_total_flops() == pair[0].flops_per_step()


def test_muon_orthogonalizes_each_part_that_the_model_names():
    """Attention's q, k and v in one step as they would as three matrices; torch's Muon differs."""
    torch.manual_seed(0)
    weights, gradients = torch.randn(2, 3, 8, 8)

    def stepped(make, weights, gradients, n_parts=0):
        weights = [nn.Parameter(weight.clone()) for weight in weights]
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient.clone()
        parts = {"parts": {weights[0]: n_parts}} if n_parts else {}
        make(weights, lr=0.1, momentum=0.9, weight_decay=0.5, **parts).step()
        return torch.cat([weight.detach() for weight in weights])

    whole = [weights.view(24, 8)], [gradients.view(24, 8)]
    alone = stepped(Muon, weights, gradients)
    assert torch.equal(stepped(Muon, *whole, n_parts=3), alone)
    torchs = partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw")
    torch.testing.assert_close(stepped(torchs, weights, gradients), alone, rtol=0, atol=0.01)
    assert not torch.allclose(stepped(torchs, *whole), alone, atol=0.01)
    torch.testing.assert_close(stepped(torchs, *whole), stepped(Muon, *whole), rtol=0, atol=0.01)


def test_with_muon_embeddings_learn_faster_and_heads_slower():
    from train import set_lr

    model = build(ngram_rows=64)
    optimizers = configure_optimizers(model, "muon", 1e-3, 0.1, 0.9, 0.95, 0.9, "cpu")
    set_lr(optimizers, 0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [group for each in optimizers for group in each.param_groups]
    rates = {names[id(p)]: group["lr"] for group in groups for p in group["params"]}
    embeddings = {"embedding.token.weight", "embedding.ngram.weight"}
    assert {name for name in rates if rates[name] == 0.2} == embeddings
    assert {n for n in rates if rates[n] == 0.05} == {"head.weight"}
    assert all(rates[name] == 0.1 for name in rates if name.startswith("blocks."))


@pytest.mark.parametrize(("device_type", "fused"), [("cpu", True), ("cuda", True), ("mps", False)])
@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd", "momentum", "muon"])
def test_only_kernels_that_honour_the_flag_are_fused(optimizer, device_type, fused):
    """MPS's fused kernels ignore found_inf: there, the host decides."""
    made = configure_optimizers(build(), optimizer, 0.1, 0.1, 0.9, 0.95, 0.9, device_type)
    torchs = [each for each in made if not isinstance(each, Muon)]
    assert [each.defaults["fused"] for each in torchs] == [fused]
    marks = [getattr(each, "_step_supports_amp_scaling", False) for each in torchs]
    assert marks == [fused]
