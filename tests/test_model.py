"""What model.py promises. Small, real, on the CPU in float32 unless a test says otherwise."""

import math

import numpy as np
import pytest
import torch
from many_starts import main as many_starts
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import model as module
from model import GPT, GPTConfig, dropped, generate

SMALL = {"vocab_size": 65, "block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 32}


def build(noise=0.2, **overrides):
    """A model whose zero-initialised matrices are no longer zero, so that every path is open."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SMALL | overrides))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=noise)
    return model


def batch(rows, model):
    generator = torch.Generator().manual_seed(0)
    shape = (rows, model.config.block_size + 1)
    window = torch.randint(model.config.vocab_size, shape, generator=generator)
    return window[:, :-1].clone(), window[:, 1:].clone()


def changed_at(tokens, place):
    other = tokens.clone()
    other[:, place] = (other[:, place] + 1) % 65
    return other


@pytest.mark.parametrize(("vocab_size", "n_embd"), [(65, 128), (50304, 256)])
def test_first_loss_is_ln_vocab_size(vocab_size, n_embd):
    model = build(noise=0.0, vocab_size=vocab_size, n_embd=n_embd)
    assert abs(model(*batch(2, model)).item() / math.log(vocab_size) - 1) < 0.01


@pytest.mark.parametrize("block_size", [32, module.PLAIN_ATTENTION_MAX + 8])
@pytest.mark.parametrize("changed", [0, 13, 31])
def test_no_logit_sees_the_future(changed, block_size):
    """By plain products, and by the fused kernel."""
    model = build(block_size=block_size).eval()
    tokens, _ = batch(2, model)
    difference = (model(tokens) - model(changed_at(tokens, changed))).abs().amax(dim=(0, 2))
    assert difference[:changed].sum() == 0
    assert (difference[changed:] > 0).all()  # control: the present and the later ones do see it


def test_a_mask_of_its_own_is_asked_in_every_pass(monkeypatch):
    """A window of eight, and documents that do not see each other."""
    model = build(n_layer=1).eval()
    tokens, targets = batch(2, model)
    causal = torch.ones(32, 32, dtype=torch.bool).tril()
    starts = torch.tensor([[0] * 10 + [1] * 22, [0] * 10 + [1] * 22])
    documents = causal & (starts[:, :, None] == starts[:, None, :])[:, None]
    for mask, hidden in ((causal.triu(-7), 20), (documents, 9)):
        monkeypatch.setattr(module, "visible", lambda tokens, n, mask=mask: mask[..., -n:, :])
        plain, last = model(tokens), model(tokens, last_only=True)
        torch.testing.assert_close(plain[:, -1:], last, rtol=0, atol=1e-5)
        other = changed_at(tokens, hidden)
        assert torch.equal(model(other)[:, -1], plain[:, -1]) and model(tokens, targets)
    monkeypatch.setattr(module, "visible", lambda tokens, n: None)
    assert not torch.equal(model(other)[0, -1], model(tokens)[0, -1])  # control


def test_queries_and_keys_are_rotated_so_that_their_product_depends_on_their_distance():
    """The table is that of float64, rounded: the last bit of a float32 cosine may differ."""
    frequency = module.ROPE_BASE ** -(np.arange(0, 8, 2) / 8)
    angle = np.arange(12)[:, None] * frequency
    cos, sin = module.rotary_tables(12, 8)
    assert np.array_equal(cos[:, :4].numpy(), np.cos(angle).astype(np.float32))
    assert np.array_equal(sin[:, 4:].numpy(), np.sin(angle).astype(np.float32))
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).expand(2, 1, 12, 1, 8)
    turned = [module.rotate(x, cos.double()[:, None], sin.double()[:, None]) for x in (q, k)]
    products = turned[0][0, :, 0] @ turned[1][0, :, 0].T
    for distance in range(12):
        along = products.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=0, atol=1e-5)
    assert products[0].std() > 0.01  # control: it does depend on the distance


def test_processes_compute_the_same_bits():
    """A few starts, with the default threads; `python tests/many_starts.py` tries 200."""
    assert many_starts(count=3, shapes=1) == 0


@pytest.mark.parametrize("case", ["plain", "three blocks", "shared blocks"])
def test_flops_match_the_counter(case):
    model = build(n_layer=3 if "blocks" in case else 1)
    if "shared" in case:  # a block that stands in several places counts in each
        model.blocks = nn.ModuleList([model.blocks[0]] * 3)
    tokens, targets = batch(3, model)
    with FlopCounterMode(display=False) as counter:
        model(tokens, targets).backward()
    assert counter.get_total_flops() == model.flops_per_token() * tokens.numel()


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_gradient_checkpointing_changes_no_gradient_and_keeps_less(dropout):
    gradients, kept = [], []
    for on in (False, True):
        model = build(grad_checkpoint=on, dropout=dropout, n_layer=4)
        torch.manual_seed(1)
        sizes = []
        pack = lambda tensor, sizes=sizes: sizes.append(tensor.numel()) or tensor  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(*batch(4, model))
            kept.append(sum(sizes))
            loss.backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
    assert torch.equal(*gradients) and kept[1] < 0.5 * kept[0]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_head_is_padded_for_the_training_loss_alone(smoothing):
    """1,000 classes, a head of 1,024 rows: a fork's loss on the logits never sees the padding, nor
    do smoothed labels. Masked targets do not count."""
    model = build(vocab_size=1000, label_smoothing=smoothing)
    assert model.head.out_features == 1024
    tokens, targets = batch(4, model)
    targets[0, 3:] = -100
    for training in (True, False):
        assert model.train(training)(tokens).size(-1) == 1000
        assert model(tokens, last_only=True).shape == (4, 1, 1000)
    log_p, counted = model.train()(tokens).log_softmax(-1), targets != -100
    right = log_p.gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
    expected = -((1 - smoothing) * right + smoothing * log_p.mean(-1))[counted].mean().item()
    loss = model(tokens, targets)
    loss.backward()
    padding = model.head.weight.grad[1000:].abs().sum()
    if smoothing:
        assert loss.item() == pytest.approx(expected, rel=1e-6) and padding == 0
    else:
        assert loss.item() > expected and padding > 0  # as likely as others at first
    exact, others = model.eval()(tokens, targets)
    assert exact.item() == pytest.approx(-right[counted].mean().item(), rel=1e-6)
    share = (log_p.argmax(-1) == targets)[counted].float().mean()
    assert others["accuracy"].item() == pytest.approx(share.item())


def test_generate_is_reproducible_and_crops():
    model = build().eval()
    prompt, _ = batch(2, model)

    def text(seed, prompt=prompt, **settings):
        generator = torch.Generator().manual_seed(seed)
        new = generate(model, prompt, 20, 32, 65, generator=generator, **settings)
        return torch.cat(list(new), dim=1)

    assert text(1).shape == (2, 20) and torch.equal(text(1), text(1))  # past block_size
    assert not torch.equal(text(1), text(2))
    greedy = text(1, temperature=0)
    longer = torch.cat((torch.zeros(2, 9, dtype=torch.long), prompt), dim=1)
    assert torch.equal(text(1, longer, temperature=0), greedy)
    assert torch.equal(greedy, text(2, top_k=1))
    assert torch.equal(greedy[:, :1], model(prompt)[:, -1].argmax(-1, keepdim=True))
    cold = torch.cat([text(seed, temperature=0.05) for seed in range(5)])
    assert (cold == greedy.repeat(5, 1))[:, 0].float().mean() > 0.7  # temperature counts
    end = int(greedy[0, 3])
    row = text(1, prompt[:1], temperature=0, end=end)
    assert row.size(1) == greedy[0].tolist().index(end) + 1


@pytest.mark.parametrize("ahead", [None, 0, 3])  # later tokens that each sees in a window of eight
@pytest.mark.parametrize("name", ["plain", "one block three times"])
def test_keys_and_values_are_kept_while_the_context_has_room(name, ahead, monkeypatch):
    """The logits are those without a cache."""
    model = build()
    if name != "plain":
        model.blocks = nn.ModuleList([model.blocks[0]] * 3)
    if ahead is not None:
        mask = torch.ones(32, 32, dtype=torch.bool).tril(ahead).triu(ahead - 7)
        square = lambda tokens: mask[: tokens.size(1), : tokens.size(1)]  # noqa: E731
        monkeypatch.setattr(module, "visible", lambda tokens, n: square(tokens)[-n:])
    computed, logits = [], []
    model.eval().blocks[0].register_forward_pre_hook(lambda _, x: computed.append(x[0].size(1)))
    hook = model.register_forward_hook(lambda _, x, y: logits.append(y[:, -1]))
    start = batch(2, model)[0][:, :5]
    tokens = torch.cat((start, *generate(model, start, 30, 32, 65)), dim=1)
    hook.remove()
    lengths = [5, *[1] * 27, 32, 32] if ahead != 3 else [*range(5, 33), 32, 32]
    assert computed[:: len(computed) // 30] == lengths
    for place, drawn_from in enumerate(logits, 5):
        expected = model(tokens[:, max(0, place - 32) : place])[:, -1]
        torch.testing.assert_close(drawn_from, expected, rtol=0, atol=1e-5)


def test_dropout_keeps_the_mean_and_drops_independently():
    torch.manual_seed(1)
    kept = (dropped(torch.ones(2_000_000), 0.2) > 0).double()
    again = (dropped(torch.ones(2_000_000), 0.2) > 0).double()
    assert abs(kept.mean() - 0.8) < 5 * math.sqrt(0.8 * 0.2 / len(kept))
    for other in (kept.roll(1), kept.roll(2), kept.roll(64), kept.roll(2**16), again):
        both = ((kept - 0.8) * (other - 0.8)).mean() / (0.8 * 0.2)
        assert abs(both) < 5 / math.sqrt(len(kept))
    for dtype in (torch.float32, torch.bfloat16):
        y = dropped(torch.ones(1_000_000, dtype=dtype), 0.05).double()
        assert abs(y.mean() - 1) < 0.003 and set(y.unique().tolist()) == {0, y.max().item()}
    assert dropped(torch.ones(100), 1 - 2**-30).isfinite().all()  # a share below 1


def test_dropout_has_one_mask_in_both_passes_of_training_by_torchs_generator():
    x = torch.ones(4096, requires_grad=True)
    torch.manual_seed(1)
    y = dropped(x, 0.5)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, y.detach())
    torch.manual_seed(1)
    assert torch.equal(dropped(x, 0.5), y)  # its stream is torch's, which a checkpoint holds
    model = build(dropout=0.5)
    tokens, targets = batch(2, model)
    assert not torch.equal(model(tokens, targets), model(tokens, targets))
    assert torch.equal(model.eval()(tokens), model(tokens))
