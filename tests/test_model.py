"""What model.py promises. Small, real, on the CPU in float32 unless a test says otherwise."""

import math
import time
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import model as module
from model import (
    GPT,
    MAX_CHUNKS,
    NGRAM_GAIN,
    GPTConfig,
    Muon,
    build_model,
    configure_optimizers,
    generate,
    orthogonal,
)

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


class Recurrent(nn.Module):
    """Not a GPT: a model that has forward() and nothing else, with parameters of every kind."""

    def __init__(self, vocab_size=65, width=16):
        super().__init__()
        self.token = nn.Embedding(vocab_size, width)
        self.conv = nn.Conv1d(width, width, 1)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(width, vocab_size)
        self.hidden = width  # a name that forks like

    def forward(self, inputs, targets=None):
        x = self.conv(self.token(inputs).mT).mT
        logits = self.head(self.dropout(self.gru(x)[0]))
        return (
            logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        )


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
    loss = model(*batch(2, model.config)).item()
    assert abs(loss / math.log(vocab_size) - 1) < 0.01


@pytest.mark.parametrize("changed", [0, 1, 13, 31])
def test_no_logit_sees_the_future(changed):
    model = build_trained().eval()
    tokens, _ = batch(2, model.config)
    other = tokens.clone()
    other[:, changed] = (other[:, changed] + 1) % model.config.vocab_size
    difference = (model(tokens) - model(other)).abs().amax(dim=(0, 2))
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
    whole = model(tokens)
    for length in (1, 2, 7):
        torch.testing.assert_close(model(tokens[:, :length]), whole[:, :length])


def test_one_batch_overfits():
    model = build(block_size=64, n_embd=64)
    optimizers = configure_optimizers(model, "adamw", 3e-3, 0.0, 0.9, 0.95, 0.9, "cpu")
    tokens, targets = batch(4, model.config)
    for _ in range(100):
        loss = model(tokens, targets)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert loss.item() < 0.1


def test_every_parameter_gets_a_gradient():
    model = build_trained()
    model(*batch(2, model.config)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("n_layer", [1, 3])
def test_flops_match_the_counter(n_layer):
    model = build(n_layer=n_layer)
    tokens, targets = batch(3, model.config)
    with FlopCounterMode(display=False) as counter:
        model(tokens, targets).backward()
    assert counter.get_total_flops() == model.flops_per_token() * tokens.numel()


def test_accumulated_gradients_equal_those_of_the_whole_batch():
    model = build_trained(n_layer=1)
    tokens, targets = batch(32, model.config)
    model(tokens, targets).backward()
    whole = flat_gradient(model)

    def accumulated(divisor):
        model.zero_grad()
        for rows in torch.arange(32).split(8):
            (model(tokens[rows], targets[rows]) / divisor).backward()
        return (flat_gradient(model) - whole).norm() / whole.norm()

    assert accumulated(4) < 1e-6
    assert accumulated(1) > 1  # control: forgetting the division is seen


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_gradient_checkpointing_changes_no_gradient(dropout):
    gradients = {}
    for on in (False, True):
        model = build_trained(grad_checkpoint=on, dropout=dropout)
        torch.manual_seed(1)
        model(*batch(4, model.config)).backward()
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


def measured_memory(model, optimizers, batch_size, dtype):
    """Peak bytes of the second of two steps whose gradients accumulate, weights and moments included."""
    tokens, targets = batch(batch_size, model.config)

    def backward():
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = model(tokens, targets)
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


def adamw(model):
    return configure_optimizers(model, "adamw", 1e-3, 0.1, 0.9, 0.95, 0.9, "cpu")


LARGE = {"n_layer": 2, "n_embd": 64, "block_size": 128, "vocab_size": 6000}  # a loss in chunks


def test_gradient_checkpointing_keeps_less():
    measured = {}
    for on in (False, True):
        model = build(grad_checkpoint=on, n_layer=6, n_embd=64, block_size=128)
        measured[on] = measured_memory(model, adamw(model), 16, "float32")
    assert measured[True] < 0.5 * measured[False]


def test_the_loss_of_a_small_vocabulary_is_that_of_its_logits_bit_for_bit():
    model = build_trained()
    tokens, targets = batch(2, model.config)
    targets[0, :5] = -100
    assert model(tokens).shape == (2, 32, 65)
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    assert torch.equal(model(tokens, targets), expected)


def loss_and_gradient(monkeypatch, chunks, dtype=torch.float32, **overrides):
    """Of 7 x 64 tokens of a vocabulary of 1,000, padded to 1,024; some targets do not count."""
    monkeypatch.setattr("model.CHUNK_LOGITS", 2**14 if chunks > 1 else 2**40)
    model = build_trained(vocab_size=1000, block_size=64, **overrides)
    tokens, targets = batch(7, model.config)
    targets[0] = -100
    targets[4, 10:40] = -100
    assert model.loss_chunks(targets.numel()) == chunks
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = model(tokens, targets)
    (3 * loss).backward()
    return loss, flat_gradient(model)


@pytest.mark.parametrize("overrides", [{}, {"label_smoothing": 0.1}, {"grad_checkpoint": True}])
def test_a_loss_in_chunks_has_the_gradients_of_the_whole(overrides, monkeypatch):
    whole, gradient = loss_and_gradient(monkeypatch, 1, **overrides)
    chunked, chunked_gradient = loss_and_gradient(monkeypatch, MAX_CHUNKS, **overrides)
    assert chunked.dtype == torch.float32 and chunked.shape == ()
    assert chunked.item() == pytest.approx(whole.item(), rel=1e-6)
    assert (chunked_gradient - gradient).norm() / gradient.norm() < 1e-6


def test_under_autocast_a_loss_in_chunks_is_as_exact_as_the_whole(monkeypatch):
    _, exact = loss_and_gradient(monkeypatch, 1)
    _, whole = loss_and_gradient(monkeypatch, 1, torch.bfloat16)
    _, chunked = loss_and_gradient(monkeypatch, MAX_CHUNKS, torch.bfloat16)
    assert (chunked - exact).norm() < 1.05 * (whole - exact).norm() < 0.1 * exact.norm()


def test_without_a_gradient_a_loss_in_chunks_is_the_same(monkeypatch):
    monkeypatch.setattr("model.CHUNK_LOGITS", 2**14)
    model = build_trained(vocab_size=1000, label_smoothing=0.1)
    tokens, targets = batch(4, model.config)
    with torch.no_grad():
        unrecorded = model(tokens, targets)
        smoothed = model.train()(tokens, targets)
        assert model.eval()(tokens, targets) != smoothed  # no smoothing in evaluation
    assert unrecorded.item() == pytest.approx(model.train()(tokens, targets).item(), rel=1e-6)


def test_without_a_gradient_none_is_computed(monkeypatch):
    monkeypatch.setattr("model.CHUNK_LOGITS", 2**14)
    model = build_trained(vocab_size=1000)
    tokens, targets = batch(4, model.config)

    def flops():
        with FlopCounterMode(display=False) as counter:
            model(tokens, targets)
        return counter.get_total_flops()

    with torch.no_grad():
        forward = flops()
    assert flops() > forward + 2 * targets.numel() * model.head.weight.numel()  # control


def test_a_head_with_a_bias_learns_it_whatever_the_vocabulary(monkeypatch):
    monkeypatch.setattr("model.CHUNK_LOGITS", 2**14)
    model = build_trained(vocab_size=1000)
    model.head.bias = torch.nn.Parameter(torch.randn(model.head.out_features))
    tokens, targets = batch(4, model.config)
    loss = model(tokens, targets)
    assert loss.item() == pytest.approx(
        module.cross_entropy(model(tokens), targets, 0.0).item(), rel=1e-6
    )
    loss.backward()
    assert model.head.bias.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_the_logits_of_a_large_vocabulary_never_stand_at_once(dtype, monkeypatch):
    monkeypatch.setattr("model.CHUNK_LOGITS", 2**20)
    model = build(n_layer=1, vocab_size=6000, block_size=128)
    tokens, targets = batch(16, model.config)

    def peak():
        with PeakMemory() as memory, torch.autocast("cpu", torch.bfloat16, dtype == "bfloat16"):
            model(tokens, targets).backward()
        return memory.peak

    logits = targets.numel() * model.head.out_features * 4  # in float32
    assert peak() < logits
    monkeypatch.setattr("model.MAX_CHUNKS", 1)
    assert peak() > 2 * logits  # control


@pytest.mark.slow
@pytest.mark.parametrize("rows, tokens", [(8, 256), (16, 512)])
def test_what_the_loss_costs_at_gpt2s_vocabulary(rows, tokens, monkeypatch):
    """With -s it prints memory and time of a forward and backward pass, in chunks and in one piece."""
    model = build(n_layer=1, n_head=4, n_embd=256, vocab_size=50257, block_size=tokens)
    inputs, targets = batch(rows, model.config)

    def cost():
        seconds = []
        for _ in range(4):  # the first one warms up
            model.zero_grad()
            start = time.perf_counter()
            with PeakMemory() as memory, torch.autocast("cpu", torch.bfloat16):
                model(inputs, targets).backward()
            seconds.append(time.perf_counter() - start)
        print(f" {rows} x {tokens}: {memory.peak / 1e6:,.0f} MB, {min(seconds):.2f} s", end="")
        return memory.peak

    in_chunks = cost()
    monkeypatch.setattr("model.CHUNK_LOGITS", 2**60)
    assert in_chunks < 0.3 * cost()


def test_flops_in_chunks_are_those_of_the_whole(monkeypatch):
    monkeypatch.setattr("model.CHUNK_LOGITS", 2**14)
    model = build(n_layer=1, vocab_size=1024)
    tokens, targets = batch(3, model.config)
    with FlopCounterMode(display=False) as counter:
        model(tokens, targets).backward()
    assert model.loss_chunks(targets.numel()) > 1
    assert counter.get_total_flops() == model.flops_per_token() * tokens.numel()


@pytest.mark.slow
def test_a_loss_in_chunks_compiles_in_deterministic_mode(monkeypatch):
    monkeypatch.setattr("model.MAX_CHUNKS", 3)
    monkeypatch.setattr("model.CHUNK_LOGITS", 2**14)
    model = build_trained(n_layer=1, vocab_size=1000, label_smoothing=0.1)
    tokens, targets = batch(4, model.config)
    model(tokens, targets).backward()
    eager = flat_gradient(model)
    torch.use_deterministic_algorithms(True)
    try:
        compiled, gradients = torch.compile(model), []
        for _ in range(2):
            model.zero_grad()
            compiled(tokens, targets).backward()
            gradients.append(flat_gradient(model))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(*gradients)
    assert (gradients[0] - eager).norm() / eager.norm() < 1e-5


def sharded_step(rank, folder):
    """One of two ranks: loss and whole gradients of a sharded model, whose loss is in chunks."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    module.CHUNK_LOGITS = 2**14
    model = build_trained(vocab_size=1000)
    tokens, targets = batch(4, model.config)
    expected = model(tokens, targets)
    expected.backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    loss = model(tokens, targets)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), gradient)
    (folder / f"done {rank}").touch()
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_loss_in_chunks_works_on_a_sharded_model(tmp_path):
    torch.multiprocessing.spawn(sharded_step, (tmp_path,), nprocs=2)
    assert len(list(tmp_path.glob("done *"))) == 2


@pytest.mark.parametrize("vocab_size", [65, 1000])  # 1,000: the loss is computed in chunks
def test_extra_heads_add_their_gradients_and_nothing_to_the_loss(vocab_size, monkeypatch):
    monkeypatch.setattr("model.CHUNK_LOGITS", 2**14)
    model = build_trained(vocab_size=vocab_size, n_future_tokens=3, label_smoothing=0.1)
    tokens, targets = batch(3, model.config)
    loss = model(tokens, targets)
    loss.backward()
    found = flat_gradient(model)
    model.zero_grad()
    kept = {}  # what goes into the heads
    with monkeypatch.context() as patch:
        patch.setattr(GPT, "loss", lambda self, head, x, targets: kept.setdefault("x", x).sum())
        model(tokens, targets)

    def mean_loss(head, x, targets):
        return F.cross_entropy(head(x).flatten(0, 1), targets.flatten(), label_smoothing=0.1)

    x = kept["x"]
    first = mean_loss(model.head, x, targets)
    assert loss.item() == pytest.approx(first.item(), rel=1e-6)
    second = mean_loss(model.extra_heads[0], x[:, :-1], targets[:, 1:])
    third = mean_loss(model.extra_heads[1], x[:, :-2], targets[:, 2:])
    (first + 0.3 * second + 0.15 * third).backward()
    torch.testing.assert_close(found, flat_gradient(model), rtol=1e-4, atol=1e-6)


def test_extra_heads_are_for_training_only():
    model = build_trained(n_future_tokens=3)
    tokens, targets = batch(2, model.config)
    for rows in (tokens[:, :1], tokens[:, :2]):  # shorter than what lies ahead
        assert model(rows, targets[:, : rows.size(1)]).isfinite()
    with torch.no_grad():
        model.extra_heads.requires_grad_(False)
        for head in model.extra_heads:
            head.weight.fill_(math.nan)
        assert model(tokens, targets).isnan()  # control: in training they are used
        model.eval()
        assert model(tokens, targets).isfinite()
        assert model(tokens).isfinite().all()


def test_label_smoothing_is_for_training_only():
    model, plain = build_trained(label_smoothing=0.1), build_trained()
    tokens, targets = batch(2, model.config)
    assert model.eval()(tokens, targets) == plain.eval()(tokens, targets)
    logits = model.train()(tokens)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)
    assert model(tokens, targets).item() == pytest.approx(expected.item())
    assert model(tokens, targets) != plain.train()(tokens, targets)


def test_ignored_targets_do_not_count():
    model = build_trained()
    tokens, targets = batch(2, model.config)
    half = targets.clone()
    half[:, 16:] = -100
    expected = F.cross_entropy(model(tokens)[:, :16].flatten(0, 1), targets[:, :16].flatten())
    assert model(tokens, half).item() == pytest.approx(expected.item(), rel=1e-6)
    assert model(tokens, half).item() != pytest.approx(model(tokens, targets).item())


def test_dropout_is_for_training_only():
    model, plain = build_trained(dropout=0.5), build_trained()
    tokens, targets = batch(2, model.config)
    assert model.eval()(tokens, targets) == plain.eval()(tokens, targets)
    assert model.train()(tokens, targets) != plain.train()(tokens, targets)


OPTIMIZERS = ("adamw", "adam", "sgd", "momentum", "muon")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
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
        loss = model(tokens, targets)
        loss.backward()
        losses.append(loss.item())
        for o in optimizers:
            o.step()
            o.zero_grad()
    assert losses[-1] < losses[0] - 0.2


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
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: not emulated)
    torch.manual_seed(0)
    shapes = ((24, 8), (8, 24), (8, 8))
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


def test_unknown_optimizer_is_named():
    with pytest.raises(ValueError, match="'lion': expected adamw, adam, sgd, momentum or muon"):
        configure_optimizers(build(), "lion", 1e-3, 0.0, 0.9, 0.95, 0.9, "cpu")


def test_generate_is_reproducible_and_crops():
    model = build_trained().eval()
    prompt, _ = batch(2, model.config)

    def text(seed, **settings):
        generator = torch.Generator().manual_seed(seed)
        new = generate(model, prompt, 20, 32, 65, generator=generator, **settings)
        return torch.cat(list(new), dim=1)

    assert text(1).shape == (2, 20)  # 32 + 20 tokens: past block_size
    assert torch.equal(text(1), text(1))
    assert not torch.equal(text(1), text(2))
    greedy = text(1, temperature=0.0)
    assert torch.equal(greedy, text(2, top_k=1))
    assert torch.equal(greedy[:, :1], model(prompt)[:, -1].argmax(-1, keepdim=True))


def test_generate_sees_only_the_last_block():
    model = build_trained().eval()
    prompt, _ = batch(1, model.config)
    longer = torch.cat((torch.zeros(1, 9, dtype=torch.long), prompt), dim=1)
    for new, new_from_longer in zip(
        generate(model, prompt, 8, 32, 65, temperature=0),
        generate(model, longer, 8, 32, 65, temperature=0),
        strict=True,
    ):
        assert torch.equal(new, new_from_longer)


def test_generate_top_k_draws_only_from_the_k_likeliest():
    model = build_trained().eval()
    prompt = batch(1, model.config)[0].expand(500, -1)
    likeliest = set(model(prompt[:1])[0, -1].topk(3).indices.tolist())
    new = next(generate(model, prompt, 1, 32, 65, temperature=50.0, top_k=3))
    assert set(new.flatten().tolist()) == likeliest


def test_generate_needs_no_more_than_logits_and_never_draws_a_row_that_pads_the_head():
    model = Recurrent(vocab_size=64)
    with torch.no_grad():
        model.head.bias[60:] = 100.0  # as likely as can be
    prompt = torch.zeros(50, 3, dtype=torch.long)
    drawn = torch.cat(list(generate(model, prompt, 5, 2, vocab_size=60)), dim=1)
    assert drawn.shape == (50, 5) and drawn.max() < 60
    assert torch.cat(list(generate(model, prompt, 5, 2, vocab_size=64)), dim=1).min() >= 60


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"n_embd": 30, "n_head": 4}, "n_embd=30 is no even multiple of n_head=4"),
        ({"n_embd": 30, "n_head": 2}, "n_embd=30 is no even multiple of n_head=2"),
        ({"n_layer": 0}, "n_layer must be at least 1, found 0"),
        ({"vocab_size": -1}, "vocab_size must be at least 1, found -1"),
    ],
)
def test_bad_shapes_are_named(overrides, message):
    with pytest.raises(ValueError, match=message):
        build(**overrides)


def test_a_model_is_built_from_a_runs_config():
    knobs = SMALL | {
        "dropout": 0.1,
        "label_smoothing": 0.2,
        "grad_checkpoint": True,
        "peak_lr": 1.0,
    }
    model = build_model(knobs | {"vocab_size": 9}, vocab_size=65)
    assert model.config == GPTConfig(
        65, 32, 2, 32, 2, dropout=0.1, label_smoothing=0.2, grad_checkpoint=True
    )
    with pytest.raises(ValueError, match="n_embd=32 is no even multiple of n_head=5"):
        build_model(knobs | {"n_head": 5}, vocab_size=65)
    with pytest.raises(TypeError, match="block_size"):
        build_model({"n_head": 2, "n_embd": 32}, vocab_size=65)


def test_too_long_a_context_is_named():
    with pytest.raises(ValueError, match="33 tokens do not fit into block_size=32"):
        build()(torch.zeros(1, 33, dtype=torch.long))


def test_bad_generate_settings_are_named():
    with pytest.raises(ValueError, match="temperature=-1"):
        next(generate(build(), torch.zeros(1, 1, dtype=torch.long), 1, 32, 65, temperature=-1))


def test_autocast_loss_is_float32_and_close():
    model = build_trained()
    tokens, targets = batch(4, model.config)
    exact = model(tokens, targets)
    with torch.autocast("cpu", torch.bfloat16):
        logits, loss = model(tokens), model(tokens, targets)
    assert loss.dtype == torch.float32
    assert logits.shape == (4, 32, 65)
    assert loss.item() == pytest.approx(exact.item(), rel=0.02)


def test_loss_of_a_bfloat16_model_is_computed_in_float32():
    model = build_trained().bfloat16()
    assert model(*batch(4, model.config)).dtype == torch.float32


def test_state_holds_parameters_only():
    model = build()
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    assert model.num_params() == sum(p.numel() for p in model.parameters())
