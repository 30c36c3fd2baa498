"""What model.py promises. Small, real, on the CPU in float32 unless a test says otherwise."""

import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from model import GPT, NGRAM_GAIN, GPTConfig, configure_optimizers, training_memory

SMALL = {"vocab_size": 65, "block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 32}


def build(**overrides):
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**SMALL, **overrides}))


def build_trained(**overrides):
    """A model whose zero-initialised matrices are no longer zero, so that every path is open."""
    model = build(**overrides)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def batch(rows, config, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, config.block_size + 1)
    window = torch.randint(config.vocab_size, shape, generator=generator)
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def flat_gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize(("vocab_size", "n_embd"), [(65, 128), (65, 384), (50304, 768)])
def test_first_loss_is_ln_vocab_size(vocab_size, n_embd):
    model = build(vocab_size=vocab_size, n_embd=n_embd)
    loss = model(*batch(2, model.config))[1].item()
    assert abs(loss / math.log(vocab_size) - 1) < 0.01


@pytest.mark.parametrize("changed", [0, 1, 13, 31])
def test_no_logit_sees_the_future(changed):
    model = build_trained().eval()
    tokens, _ = batch(2, model.config)
    other = tokens.clone()
    other[:, changed] = (other[:, changed] + 1) % model.config.vocab_size
    difference = (model(tokens)[0] - model(other)[0]).abs().amax(dim=(0, 2))
    assert difference[:changed].sum() == 0
    assert (difference[changed:] > 0).all()  # control: the present and the later ones do see it


def test_input_embedding_mixes_the_present_token_with_the_three_before():
    embedding = build_trained().embedding
    tokens = torch.tensor([[5, 1, 4, 1, 3]])
    e, conv = embedding.token(tokens)[0], embedding.conv
    last = e[4] * conv[0] + e[3] * conv[1] + e[2] * conv[2] + e[1] * conv[3]
    last = last + NGRAM_GAIN * embedding.ngram.weight[embedding.ngram_row(tokens)[0, 4]]
    torch.testing.assert_close(embedding(tokens)[0, 4], last)


def test_plain_attention_equals_the_fused_kernel():
    from model import causal_attention

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 20, 8) for _ in range(3))
    fused = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(causal_attention(q, k, v, 0.0), fused)
    with pytest.raises(AssertionError):  # control: without the mask they differ
        torch.testing.assert_close(causal_attention(q, k, v, 0.0), (q @ k.mT).softmax(-1) @ v)


def test_short_and_long_contexts_agree():
    """The same text gives the same logits, whatever follows it and however long the model's context is."""
    model = build_trained().eval()
    tokens, _ = batch(2, model.config)
    whole = model(tokens)[0]
    for length in (1, 2, 7):
        torch.testing.assert_close(model(tokens[:, :length])[0], whole[:, :length])


def test_one_batch_overfits():
    model = build(block_size=64, n_embd=64)
    optimizers = configure_optimizers(model, "adamw", 3e-3, 0.0, 0.9, 0.95, 0.9, "cpu")
    tokens, targets = batch(4, model.config)
    for _ in range(100):
        loss = model(tokens, targets)[1]
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert loss.item() < 0.1


def test_every_parameter_gets_a_gradient():
    model = build_trained()
    model(*batch(2, model.config))[1].backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("n_layer", [1, 3])
def test_flops_match_the_counter(n_layer):
    model = build(n_layer=n_layer)
    tokens, targets = batch(3, model.config)
    with FlopCounterMode(display=False) as counter:
        model(tokens, targets)[1].backward()
    assert counter.get_total_flops() == model.flops_per_token() * tokens.numel()


def test_accumulated_gradients_equal_those_of_the_whole_batch():
    model = build_trained(n_layer=1)
    tokens, targets = batch(32, model.config)
    model(tokens, targets)[1].backward()
    whole = flat_gradient(model)

    def accumulated(divisor):
        model.zero_grad()
        for rows in torch.arange(32).split(8):
            (model(tokens[rows], targets[rows])[1] / divisor).backward()
        return (flat_gradient(model) - whole).norm() / whole.norm()

    assert accumulated(4) < 1e-6
    assert accumulated(1) > 1  # control: forgetting the division is seen


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_gradient_checkpointing_changes_no_gradient(dropout):
    gradients = {}
    for on in (False, True):
        model = build_trained(grad_checkpoint=on, dropout=dropout)
        torch.manual_seed(1)
        model(*batch(4, model.config))[1].backward()
        gradients[on] = flat_gradient(model)
    assert torch.equal(gradients[False], gradients[True])


class PeakMemory(TorchDispatchMode):
    """Bytes in tensors that live at once, at most, of those made inside the block; each storage
    counted once."""

    def __init__(self):
        super().__init__()
        self.live, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        old = {storage._cdata for storage in storages((args, kwargs))}
        for storage in storages(result):
            if storage._cdata not in old | self.live.keys():  # not a view, not in place
                self.live[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.freed, storage._cdata)
        return result

    def freed(self, key):
        self.now -= self.live.pop(key)


def storages(tree):
    return [x.untyped_storage() for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def measured_memory(model, optimizer, batch_size, dtype):
    """Peak bytes of the second of two steps whose gradients accumulate, weights and moments included."""
    tokens, targets = batch(batch_size, model.config)
    optimizers = configure_optimizers(model, optimizer, 1e-3, 0.1, 0.9, 0.95, 0.9, "cpu")

    def backward():
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = model(tokens, targets)[1]
        loss.backward()

    backward()
    for o in optimizers:
        o.step()
    held = sum(p.nbytes + p.grad.nbytes for p in model.parameters())
    for o in optimizers:
        tensors = [t for state in o.state.values() for t in tree_leaves(state)]
        held += sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))
    with PeakMemory() as memory:
        backward()
    return held + memory.peak


@pytest.mark.parametrize("grad_checkpoint", [False, True])
@pytest.mark.parametrize(
    ("shape", "batch_size", "optimizer", "dtype"),
    [
        ({"n_layer": 1, "n_embd": 128, "block_size": 64}, 32, "adamw", "bfloat16"),
        ({"n_layer": 4, "n_embd": 128, "block_size": 64}, 12, "momentum", "float32"),
        ({"n_layer": 3, "n_embd": 64, "block_size": 128, "dropout": 0.1}, 16, "sgd", "bfloat16"),
        ({"n_layer": 2, "n_embd": 64, "block_size": 64, "vocab_size": 5000}, 8, "muon", "bfloat16"),
    ],
)
def test_memory_is_predicted_within_5_percent(
    shape, batch_size, optimizer, dtype, grad_checkpoint, monkeypatch
):
    # A table of 8,192 rows would outweigh the activations, which are what is hard to predict.
    monkeypatch.setattr("model.NGRAM_ROWS", 64)
    model = build(**shape, grad_checkpoint=grad_checkpoint)
    predicted = training_memory(model.config, batch_size, optimizer, dtype, grad_checkpoint)
    measured = measured_memory(model, optimizer, batch_size, dtype)
    assert sum(predicted.values()) == pytest.approx(measured, rel=0.05), predicted


def test_gradient_checkpointing_keeps_less():
    measured = {}
    for on in (False, True):
        model = build(grad_checkpoint=on, n_layer=6, n_embd=64, block_size=128)
        measured[on] = measured_memory(model, "sgd", 16, "float32")
    assert measured[True] < 0.5 * measured[False]


def test_label_smoothing_is_for_training_only():
    model, plain = build_trained(label_smoothing=0.1), build_trained()
    tokens, targets = batch(2, model.config)
    assert model.eval()(tokens, targets)[1] == plain.eval()(tokens, targets)[1]
    logits = model.train()(tokens, targets)[0]
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)
    assert model(tokens, targets)[1].item() == pytest.approx(expected.item())
    assert model(tokens, targets)[1] != plain.train()(tokens, targets)[1]


def test_ignored_targets_do_not_count():
    model = build_trained()
    tokens, targets = batch(2, model.config)
    half = targets.clone()
    half[:, 16:] = -100
    expected = F.cross_entropy(model(tokens)[0][:, :16].flatten(0, 1), targets[:, :16].flatten())
    assert model(tokens, half)[1].item() == pytest.approx(expected.item(), rel=1e-6)
    assert model(tokens, half)[1].item() != pytest.approx(model(tokens, targets)[1].item())


def test_dropout_is_for_training_only():
    model, plain = build_trained(dropout=0.5), build_trained()
    tokens, targets = batch(2, model.config)
    assert model.eval()(tokens, targets)[1] == plain.eval()(tokens, targets)[1]
    assert model.train()(tokens, targets)[1] != plain.train()(tokens, targets)[1]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "momentum", "muon"])
def test_every_optimizer_lowers_the_loss_and_owns_every_parameter_once(optimizer):
    model = build(n_layer=1)
    lr = {"sgd": 0.3, "momentum": 0.1}.get(optimizer, 1e-2)
    optimizers = configure_optimizers(model, optimizer, lr, 0.1, 0.9, 0.95, 0.9, "cpu")
    owned = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    assert sorted(map(id, owned)) == sorted(map(id, model.parameters()))
    assert all(group["lr"] == lr for o in optimizers for group in o.param_groups)
    tokens, targets = batch(8, model.config)
    losses = []
    for _ in range(20):
        loss = model(tokens, targets)[1]
        loss.backward()
        losses.append(loss.item())
        for o in optimizers:
            o.step()
            o.zero_grad()
    assert losses[-1] < losses[0] - 0.2


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "momentum", "muon"])
def test_weight_decay_falls_on_matrices_only(optimizer):
    """With no gradient, a step is nothing but weight decay."""
    model = build_trained()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for o in configure_optimizers(model, optimizer, 0.1, 0.5, 0.9, 0.95, 0.9, "cpu"):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        o.step()
    for name, p in model.named_parameters():
        shrunk = before[name] * (1 - 0.1 * 0.5)
        expected = before[name] if name == "embedding.conv" else shrunk
        torch.testing.assert_close(p.detach(), expected, msg=name)


def test_unknown_optimizer_is_named():
    with pytest.raises(ValueError, match="'adam'"):
        configure_optimizers(build(), "adam", 1e-3, 0.0, 0.9, 0.95, 0.9, "cpu")


def test_generate_is_reproducible_and_crops():
    model = build_trained().train()
    prompt, _ = batch(2, model.config)

    def text(seed, **settings):
        generator = torch.Generator().manual_seed(seed)
        return torch.cat(list(model.generate(prompt, 20, generator=generator, **settings)), dim=1)

    assert text(1).shape == (2, 20)  # 32 + 20 tokens: past block_size
    assert torch.equal(text(1), text(1))
    assert not torch.equal(text(1), text(2))
    greedy = text(1, temperature=0.0)
    assert torch.equal(greedy, text(2, top_k=1))
    assert torch.equal(greedy[:, :1], model.eval()(prompt)[0][:, -1].argmax(-1, keepdim=True))
    assert model.training is False


def test_generate_leaves_the_mode_alone_and_sees_only_the_last_block():
    model = build_trained(dropout=0.5).train()
    prompt, _ = batch(1, model.config)
    longer = torch.cat((torch.zeros(1, 9, dtype=torch.long), prompt), dim=1)
    for new, new_from_longer in zip(
        model.generate(prompt, 8, temperature=0),
        model.generate(longer, 8, temperature=0),
        strict=True,
    ):
        assert model.training  # between two tokens, too
        assert torch.equal(new, new_from_longer)


def test_generate_top_k_draws_only_from_the_k_likeliest():
    model = build_trained().eval()
    prompt = batch(1, model.config)[0].expand(500, -1)
    likeliest = set(model(prompt[:1])[0][0, -1].topk(3).indices.tolist())
    assert (
        set(next(model.generate(prompt, 1, temperature=50.0, top_k=3)).flatten().tolist())
        == likeliest
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"n_embd": 30, "n_head": 4}, "n_embd=30 is not a multiple of n_head=4"),
        ({"n_embd": 30, "n_head": 2}, "a head size of 15"),
        ({"n_layer": 0}, "n_layer must be at least 1, found 0"),
        ({"vocab_size": -1}, "vocab_size must be at least 1, found -1"),
    ],
)
def test_bad_shapes_are_named(overrides, message):
    with pytest.raises(ValueError, match=message):
        build(**overrides)


def test_too_long_a_context_is_named():
    with pytest.raises(ValueError, match="33 tokens do not fit into block_size=32"):
        build()(torch.zeros(1, 33, dtype=torch.long))


def test_bad_generate_settings_are_named():
    with pytest.raises(ValueError, match="temperature=-1"):
        next(build().generate(torch.zeros(1, 1, dtype=torch.long), 1, temperature=-1))


def test_autocast_loss_is_float32_and_close():
    model = build_trained()
    tokens, targets = batch(4, model.config)
    exact = model(tokens, targets)[1]
    with torch.autocast("cpu", torch.bfloat16):
        logits, loss = model(tokens, targets)
    assert loss.dtype == torch.float32
    assert logits.shape == (4, 32, 65)
    assert loss.item() == pytest.approx(exact.item(), rel=0.02)


def test_loss_of_a_bfloat16_model_is_computed_in_float32():
    model = build_trained().bfloat16()
    assert model(*batch(4, model.config))[1].dtype == torch.float32


def test_state_holds_parameters_only():
    model = build()
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    assert model.num_params() == sum(p.numel() for p in model.parameters())
