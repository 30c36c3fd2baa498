"""What model.py promises. Small, real, on the CPU in float32 unless a test says otherwise."""

import math
import runpy

import pytest
import torch
from conftest import REPO
from helpers import SMALL, Recurrent, batch, build, build_trained
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import model as module
from bench import most_allocated
from model import generate
from plumbing import weights
from plumbing.dropout import dropped

GPT2 = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32}
GPT2 |= {"dropout": 0.0, "grad_checkpoint": False}
EXTRAS = {"ngram_rows": 8192, "conv_width": 4}
PLAIN = (
    "embedding.token.weight blocks.0.attention.qkv.weight blocks.0.attention.out.weight "
    "blocks.0.mlp.up.weight blocks.0.mlp.down.weight head.weight"
).split()
both = pytest.mark.parametrize("extras", [{}, EXTRAS], ids=["plain", "extras"])


def flat_gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@both
@pytest.mark.parametrize(("vocab_size", "n_embd"), [(65, 128), (50304, 256)])
def test_first_loss_is_ln_vocab_size(vocab_size, n_embd, extras):
    model = build(vocab_size=vocab_size, n_embd=n_embd, **extras)
    loss = model(*batch(2, model.config)).item()
    assert abs(loss / math.log(vocab_size) - 1) < 0.01


@both
@pytest.mark.parametrize("changed", [0, 1, 13, 31])
def test_no_logit_sees_the_future(changed, extras):
    model = build_trained(**extras).eval()
    tokens, _ = batch(2, model.config)
    other = tokens.clone()
    other[:, changed] = (other[:, changed] + 1) % model.config.vocab_size
    difference = (model(tokens) - model(other)).abs().amax(dim=(0, 2))
    assert difference[:changed].sum() == 0
    assert (difference[changed:] > 0).all()  # control: the present and the later ones do see it


def names(**overrides):
    return [name for name, _ in build(n_layer=1, **overrides).named_parameters()]


def test_the_default_is_the_plain_transformer_and_each_extra_adds_its_own_parameters():
    assert names() == PLAIN
    assert set(names(ngram_rows=9)) - set(PLAIN) == {"embedding.ngram.weight"}
    assert set(names(conv_width=2)) - set(PLAIN) == {"embedding.conv"}
    assert set(PLAIN) < set(names(**EXTRAS)) == set(build(n_layer=1, **EXTRAS).state_dict())


def test_input_embedding_mixes_the_present_token_with_the_three_before():
    embedding = build_trained(ngram_rows=8192, conv_width=4).embedding
    tokens = torch.tensor([[5, 1, 4, 1, 3]])
    e, conv = embedding.token(tokens)[0], embedding.conv
    last = e[4] * conv[0] + e[3] * conv[1] + e[2] * conv[2] + e[1] * conv[3]
    last = last + embedding.ngram.weight[embedding.ngram_row(tokens)[0, 4]]
    torch.testing.assert_close(embedding(tokens)[0, 4], last)
    table = build_trained(ngram_rows=8192).embedding  # each without the other
    vector = table.ngram.weight[table.ngram_row(tokens)]
    torch.testing.assert_close(table(tokens), table.token(tokens) + vector)
    conv = build_trained(conv_width=2).embedding
    e = conv.token(tokens)[0]
    torch.testing.assert_close(conv(tokens)[0, 4], e[4] * conv.conv[0] + e[3] * conv.conv[1])


def test_queries_and_keys_are_rotated_so_that_their_product_depends_on_their_distance():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).expand(2, 1, 12, 1, 8)
    cos, sin = (table.double()[:, None] for table in module.rotary_tables(12, 8))
    a, b = module.rotate(q, cos, sin).chunk(2, dim=-1)
    angle = torch.arange(12)[:, None] / module.ROPE_BASE ** (torch.arange(0, 8, 2) / 8)
    turned = torch.polar(torch.ones_like(angle), angle) * torch.complex(
        *q[0, :, 0].chunk(2, dim=-1)
    )
    torch.testing.assert_close(torch.complex(a, b)[0, :, 0].to(torch.complex64), turned.cfloat())
    products = torch.einsum("qd,kd->qk", *(module.rotate(x, cos, sin)[0, :, 0] for x in (q, k)))
    for distance in range(12):
        along = products.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=0, atol=1e-5)
    assert products[0].std() > 0.01  # control: it does depend on the distance


@pytest.mark.parametrize("case", ["plain", "three blocks", "shared blocks"])
def test_flops_match_the_counter(case):
    model = build(n_layer=3 if "blocks" in case else 1)
    if "shared" in case:  # a block that stands in several places counts in each
        model.blocks = nn.ModuleList([model.blocks[0]] * 3)
    tokens, targets = batch(3, model.config)
    with FlopCounterMode(display=False) as counter:
        model(tokens, targets).backward()
    assert counter.get_total_flops() == model.flops_per_token() * tokens.numel()


def peak_of_a_pass(model):
    """Bytes, forward and backward."""
    tokens, targets = batch(16, model.config)
    return most_allocated(lambda: model(tokens, targets).backward(), torch.device("cpu"))


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_gradient_checkpointing_changes_no_gradient_and_keeps_less(dropout):
    gradients = {}
    peak = {}
    for on in (False, True):
        shape = {"n_layer": 6, "n_embd": 64, "block_size": 128}
        model = build_trained(grad_checkpoint=on, dropout=dropout, **shape)
        torch.manual_seed(1)
        peak[on] = peak_of_a_pass(model)
        gradients[on] = flat_gradient(model)
    assert torch.equal(gradients[False], gradients[True])
    assert peak[True] < 0.5 * peak[False]


def test_smoothed_labels_leave_out_the_padding_of_the_head():
    """1,000 classes, a head of 1,024 rows."""
    model = build_trained(vocab_size=1000, label_smoothing=0.1)
    assert model.head.out_features == 1024
    tokens, targets = batch(4, model.config)
    targets[0, 3:] = -100
    logits = model(tokens)
    assert logits.size(-1) == 1000
    log_p, counted = logits.log_softmax(-1), targets != -100
    right = log_p.gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
    smoothed = (0.9 * right + 0.1 * log_p.mean(-1))[counted]  # by hand, from 1,000 classes
    expected = -smoothed.mean().item()
    loss = model(tokens, targets)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert model.head.weight.grad[:1000].abs().sum() > 0
    assert model.head.weight.grad[1000:].abs().sum() == 0


def test_generate_is_reproducible_and_crops():
    model = build_trained().eval()
    prompt, _ = batch(2, model.config)

    def text(seed, **settings):
        generator = torch.Generator().manual_seed(seed)
        new = generate(model, prompt, 20, 32, 65, generator=generator, **settings)
        return torch.cat(list(new), dim=1)

    assert text(1).shape == (2, 20)  # 32 + 20 tokens: past block_size
    longer = torch.cat((torch.zeros(2, 9, dtype=torch.long), prompt), dim=1)
    cropped = torch.cat(list(generate(model, longer, 20, 32, 65, temperature=0)), dim=1)
    assert torch.equal(cropped, text(1, temperature=0.0))
    assert torch.equal(text(1), text(1))
    assert not torch.equal(text(1), text(2))
    greedy = text(1, temperature=0.0)
    assert torch.equal(greedy, text(2, top_k=1))
    assert torch.equal(greedy[:, :1], model(prompt)[:, -1].argmax(-1, keepdim=True))
    model(greedy[:, :-1], greedy[:, 1:])[0].backward()  # what was drawn may be trained on
    assert flat_gradient(model).abs().sum() > 0


@pytest.mark.parametrize("name", ["plain", "extras", "one block three times", "gpt2"])
@pytest.mark.parametrize("ahead", [None, 0, 3])  # later tokens that each sees in a window of eight
def test_keys_and_values_are_kept_while_the_context_has_room(
    name, ahead, monkeypatch, train_as_it_was
):
    model = build_trained(**EXTRAS if name == "extras" else {})
    if name == "one block three times":
        model.blocks = nn.ModuleList([model.blocks[0]] * 3)
    if name == "gpt2":
        monkeypatch.setattr(weights, "read", weights.read)  # which the example replaces
        model = runpy.run_path(REPO / "examples" / "gpt2.py")["GPT2"](GPT2, 65)
    if ahead is not None:
        mask = torch.ones(32, 32, dtype=torch.bool).tril(ahead).triu(ahead - 7)
        square = lambda tokens: mask[: tokens.size(1), : tokens.size(1)]  # noqa: E731
        monkeypatch.setattr(module, "visible", lambda tokens, n: square(tokens)[-n:])
    computed, logits = [], []
    model.eval().blocks[0].register_forward_pre_hook(lambda _, x: computed.append(x[0].size(1)))
    hook = model.register_forward_hook(lambda _, x, y: logits.append(y[:, -1]))
    start = batch(2, module.GPTConfig(**SMALL))[0][:, :5]
    tokens = torch.cat((start, *generate(model, start, 30, 32, 65)), dim=1)
    hook.remove()
    lengths = [5, *[1] * 27, 32, 32] if ahead != 3 else [*range(5, 33), 32, 32]
    assert computed[:: len(computed) // 30] == lengths
    for place, drawn_from in enumerate(logits, 5):
        expected = model(tokens[:, max(0, place - 32) : place])[:, -1]
        torch.testing.assert_close(drawn_from, expected, rtol=0, atol=1e-5)


def test_generate_needs_no_more_than_logits_and_never_draws_a_row_that_pads_the_head():
    model = Recurrent(vocab_size=64)
    with torch.no_grad():
        model.head.bias[60:] = 100.0  # as likely as can be
    prompt = torch.zeros(50, 3, dtype=torch.long)
    drawn = torch.cat(list(generate(model, prompt, 5, 2, vocab_size=60)), dim=1)
    assert drawn.shape == (50, 5) and drawn.max() < 60
    assert torch.cat(list(generate(model, prompt, 5, 2, vocab_size=64)), dim=1).min() >= 60


@pytest.mark.parametrize("how", ["autocast", "a bfloat16 model"])
def test_the_loss_is_computed_in_float32_and_close(how):
    model = build_trained()
    tokens, targets = batch(4, model.config)
    exact = model(tokens, targets)
    autocast = how == "autocast"
    model = model if autocast else model.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits, loss = model(tokens), model(tokens, targets)
    assert loss.dtype == torch.float32
    assert logits.shape == (4, 32, 65)
    assert loss.item() == pytest.approx(exact.item(), rel=0.02)


# ---- dropout -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
def test_dropout_keeps_the_mean_and_drops_independently(seed):
    torch.manual_seed(seed)
    kept = (dropped(torch.ones(10_000_000), 0.2) > 0).double()
    again = (dropped(torch.ones(10_000_000), 0.2) > 0).double()
    assert abs(kept.mean() - 0.8) < 5 * math.sqrt(0.8 * 0.2 / len(kept))
    for other in (kept.roll(1), kept.roll(2), kept.roll(64), kept.roll(2**16), again):
        both = ((kept - 0.8) * (other - 0.8)).mean() / (0.8 * 0.2)
        assert abs(both) < 5 / math.sqrt(len(kept))
    assert abs(dropped(torch.ones(1_000_000), 0.05).mean() - 1) < 0.002
    assert dropped(torch.ones(100), 1 - 2**-30).isfinite().all()  # a share below 1


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_dropout_has_a_mask_of_its_own_in_each_call_and_one_in_both_passes(compiled):
    def twice(x):
        return dropped(x, 0.5), dropped(x, 0.5)

    x = torch.ones(4096, requires_grad=True)
    torch.manual_seed(1)
    for y in (torch.compile(twice) if compiled else twice)(x):
        (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert torch.equal(grad, y.detach())
    first, second = twice(x) if not compiled else torch.compile(twice)(x)
    assert 0.4 < (first == second).double().mean() < 0.6
