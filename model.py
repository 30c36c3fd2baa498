"""The model: a small, current GPT. One layer by default, any number by `n_layer`.

    tokens -> input embedding -> n_layer x (attention, MLP) -> norm -> head -> logits

Attention and MLP each add to one residual stream. Shapes use B (sequences), T (tokens in each),
C (`n_embd`), H (`n_head`), D = C / H, V (`vocab_size`). Optimizers and sampling, for any nn.Module,
are here too. Imports nothing but torch.
"""

import math
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

CONV_WIDTH = 4  # tokens that the input convolution sees: the present one and the three before it
NGRAM = 3  # tokens that one vector of the n-gram table stands for
NGRAM_ROWS = 8_192  # n-grams share these rows by their hash
NGRAM_GAIN = 2.0  # factor of its vectors; under Adam it doubles the table's learning rate
MLP_MULTIPLE = 32  # the hidden width of the MLP is a multiple of this, for tensor cores and AMX
ROPE_BASE = 10_000.0  # the longest rotary wavelength is 2 pi times this, in tokens
LARGE_VOCAB = 1000  # from here on the head is padded, and the loss may be computed in chunks
HEAD_MULTIPLE = 64  # rows of a padded head, for tensor cores
CHUNK_LOGITS = 2**24  # most logits in a chunk (64 MiB in float32), as far as MAX_CHUNKS allows
MAX_CHUNKS = 8  # more make torch.compile slow and its code use more memory
EXTRA_HEAD_WEIGHT = 0.3  # of the loss of the token after the next; halved for each one after that
PLAIN_ATTENTION_MAX = 512  # longest context where, on a CPU, plain products beat the fused kernel


@dataclass
class GPTConfig:
    vocab_size: int
    block_size: int  # longest context, tokens
    n_head: int
    n_embd: int
    n_layer: int = 1
    dropout: float = 0.0  # 0 = off
    label_smoothing: float = 0.0  # 0 = off; never in evaluation
    n_future_tokens: int = 1  # that each position learns to predict; 1 = only the next
    grad_checkpoint: bool = False  # recompute each block in the backward pass, to hold less memory

    def __post_init__(self):
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "n_future_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, found {getattr(self, name)}")
        if self.n_embd % (2 * self.n_head):  # rotary positions turn pairs of the numbers in a head
            raise ValueError(f"n_embd={self.n_embd} is no even multiple of n_head={self.n_head}")


def padded(vocab_size):
    """Rows of a head: GPT-2's 50,257 become 50,304. The added rows are never targets, so the model
    learns to give them no probability; `generate` cuts them off."""
    return round_up(vocab_size, HEAD_MULTIPLE if vocab_size >= LARGE_VOCAB else 1)


def round_up(number, multiple):
    return -(-number // multiple) * multiple


def norm(x):
    """LayerNorm without gain or bias, which the next matrix can learn. RMSNorm trains equally well
    but has no fused CPU kernel, so a step takes longer there."""
    return F.layer_norm(x, (x.size(-1),))


def rotary_tables(block_size, head_size):
    """cos and sin of each position at each frequency, (T, D / 2) (Su et al. 2021, "RoFormer")."""
    frequency = ROPE_BASE ** -(torch.arange(0, head_size, 2).float() / head_size)
    angle = torch.arange(block_size).float()[:, None] * frequency[None, :]
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Rotates each pair of numbers in x (B, T, H, D) by its position's angle, so that the product
    of a query and a key depends on their distance."""
    cos, sin = (table[: x.size(1), None].to(x.dtype) for table in (cos, sin))
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def causal_attention(q, k, v, dropout):
    """q, k, v (B, H, T, D) to (B, H, T, D): each token sees itself and the past.

    On a CPU the backward pass of the fused kernel is slow: in bfloat16, plain matrix products take
    3 ms against 23 at T = 64 and 8 against 16 at T = 256; at T = 1,024 the two are even.
    """
    B, H, T, D = q.shape
    if q.device.type != "cpu" or T > PLAIN_ATTENTION_MAX:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
    q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
    future = torch.full((T, T), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    scores = torch.baddbmm(future, q, k.transpose(1, 2), alpha=1 / math.sqrt(D))
    weights = F.dropout(scores.softmax(dim=-1), dropout)
    return torch.bmm(weights, v).view(B, H, T, D)


class InputEmbedding(nn.Module):
    """tokens (B, T) to (B, T, C). Each position includes the few tokens before it, so that even
    one attention layer can look up what followed the same letters earlier.

    A causal depthwise convolution (So et al. 2021, "Primer") mixes the last CONV_WIDTH embeddings;
    its random start tells "ab" from "ba". A hashed table adds a vector for the last NGRAM tokens
    (Huang et al. 2025, "Over-Tokenized Transformer"); it starts at zero.
    """

    def __init__(self, config):
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.n_embd)
        self.ngram = nn.Embedding(NGRAM_ROWS, config.n_embd)
        self.conv = nn.Parameter(torch.empty(CONV_WIDTH, config.n_embd))  # row 0: the present token

    def forward(self, tokens):
        T, device_type = tokens.size(1), tokens.device.type
        x = self.token(tokens)
        if torch.is_autocast_enabled(device_type):  # half the bytes in the residual stream
            x = x.to(torch.get_autocast_dtype(device_type))
        past, conv = F.pad(x, (0, 0, CONV_WIDTH - 1, 0)), self.conv.to(x.dtype)
        x = x * conv[0]
        for lag in range(1, CONV_WIDTH):
            first = CONV_WIDTH - 1 - lag
            x = torch.addcmul(x, past[:, first : first + T], conv[lag])
        return torch.add(x, self.ngram(self.ngram_row(tokens)).to(x.dtype), alpha=NGRAM_GAIN)

    def ngram_row(self, tokens):
        """The row of the table for each position, (B, T), by a polynomial hash within 64 bits."""
        T = tokens.size(1)
        past = F.pad(tokens + 1, (NGRAM - 1, 0))  # 0 stands for "before the first token"
        row = torch.zeros_like(tokens)
        for first in range(NGRAM):
            row = (row * 1_000_003 + past[:, first : first + T]) % 2_147_483_647
        return row % NGRAM_ROWS


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.out = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x, cos, sin):
        B, T, C = x.shape
        D = C // self.n_head
        qk, v = self.qkv(x).split((2 * C, C), dim=-1)
        # All queries and keys have one length (Henry et al. 2020), which bounds the scores.
        qk = rotate(norm(qk.reshape(B, T, 2 * self.n_head, D)), cos, sin)
        q, k = qk.transpose(1, 2).chunk(2, dim=1)
        v = v.view(B, T, self.n_head, D).transpose(1, 2)
        y = causal_attention(q, k, v, self.dropout if self.training else 0.0)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020), with as many weights as an MLP of four times n_embd."""

    def __init__(self, config):
        super().__init__()
        hidden = round_up(8 * config.n_embd // 3, MLP_MULTIPLE)
        self.up = nn.Linear(config.n_embd, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, config.n_embd, bias=False)

    def forward(self, x):
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = Attention(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, cos, sin):
        x = x + self.dropout(self.attention(norm(x), cos, sin))
        return x + self.dropout(self.mlp(norm(x)))


def cross_entropy(logits, targets, label_smoothing, reduction="mean"):
    """In nats and float32, over the targets that are not -100. logits: (..., V), targets: (...)."""
    if logits.shape[:-1] != targets.shape:
        shapes = f"logits {tuple(logits.shape)}, targets {tuple(targets.shape)}"
        raise ValueError(f"{shapes}: expected (..., classes) and (...); else write an evaluate()")
    # flattened: the loss over (B, V, T) raises in strict deterministic mode on CUDA
    return F.cross_entropy(
        logits.float().flatten(0, -2),
        targets.flatten(),
        ignore_index=-100,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )


class ChunkedCrossEntropy(torch.autograd.Function):
    """Summed cross entropy of the logits x (N, C) @ weight (V, C).T, held one chunk at a time.

    The forward pass also computes the gradients, chunk by chunk, so that nothing is recomputed and
    only the sum of the weight's gradients is kept (as in Liger Kernel, Hsu et al. 2024).
    """

    @staticmethod
    def forward(ctx, x, weight, targets, label_smoothing, chunks):
        def chunk_loss(x, weight, targets):
            return cross_entropy(F.linear(x, weight), targets, label_smoothing, "sum")

        low = weight.to(x.dtype)
        loss = torch.zeros((), device=x.device)
        x_grads = []
        weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        for chunk in zip(x.chunk(chunks), targets.chunk(chunks), strict=True):
            gradients, part = torch.func.grad_and_value(chunk_loss, (0, 1))(chunk[0], low, chunk[1])
            loss = loss + part
            x_grads.append(gradients[0])
            weight_grad += gradients[1]
            del gradients  # before the next chunk has its own
        ctx.save_for_backward(torch.cat(x_grads), weight_grad.to(weight.dtype))
        return loss

    @staticmethod
    def backward(ctx, loss_grad):
        x_grad, weight_grad = ctx.saved_tensors
        return x_grad * loss_grad, weight_grad * loss_grad, None, None, None


class GPT(nn.Module):
    muon_prefix = "blocks."  # Muon trains the matrices whose names begin with this
    undecayed = ("embedding.conv",)  # no weight decay: a short filter per channel, not a matrix

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding = InputEmbedding(config)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        heads = [
            nn.Linear(config.n_embd, padded(config.vocab_size), bias=False)
            for _ in range(config.n_future_tokens)
        ]
        self.head = heads[0]
        self.extra_heads = nn.ModuleList(heads[1:])  # only training uses them
        cos, sin = rotary_tables(config.block_size, config.n_embd // config.n_head)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        """Normal with std 1 / sqrt(fan_in). What adds to the residual stream starts at zero: each
        block begins as the identity (Goyal et al. 2017). A small head: a first loss of ln V."""
        self.embedding.token.weight.normal_()
        self.embedding.ngram.weight.zero_()
        self.embedding.conv.normal_(std=1 / math.sqrt(CONV_WIDTH))
        for head in (self.head, *self.extra_heads):
            head.weight.normal_(std=0.1 / math.sqrt(head.in_features))
        for block in self.blocks:
            for matrix in (block.attention.qkv, block.mlp.up):
                matrix.weight.normal_(std=1 / math.sqrt(matrix.in_features))
            for matrix in (block.attention.out, block.mlp.down):
                matrix.weight.zero_()

    def forward(self, inputs, targets=None):
        """inputs, targets: int64 (B, T). Without targets, returns the logits (B, T, padded V). With
        targets, returns their mean cross entropy in nats, a float32 scalar, ignoring those of -100.

        In training mode labels are smoothed, and the gradient includes the extra heads' losses
        (multi-token prediction, Gloeckle et al. 2024). The value does not, so that runs with and
        without them compare. Raises ValueError if T is above `block_size`.
        """
        T, block_size = inputs.size(1), self.config.block_size
        if T > block_size:
            raise ValueError(f"{T} tokens do not fit into block_size={block_size}")
        x = self.dropout(self.embedding(inputs))
        for block in self.blocks:
            if self.config.grad_checkpoint and torch.is_grad_enabled():
                x = checkpoint(block, x, self.cos, self.sin, use_reentrant=False)
            else:
                x = block(x, self.cos, self.sin)
        x = norm(x)
        if targets is None:
            return self.head(x)
        loss = self.loss(self.head, x, targets)
        if self.training:
            weight = EXTRA_HEAD_WEIGHT
            for ahead, head in zip(range(1, T), self.extra_heads, strict=False):
                extra = self.loss(head, x[:, :-ahead], targets[:, ahead:])
                loss = loss + weight * (extra - extra.detach())  # adds to the gradient alone
                weight /= 2
        return loss

    def loss(self, head, x, targets):
        """Mean cross entropy of head(x): x (B, T, C), targets (B, T)."""
        label_smoothing = self.config.label_smoothing if self.training else 0.0
        chunks = self.loss_chunks(targets.numel())
        if chunks == 1 or not torch.is_grad_enabled():
            return cross_entropy(head(x), targets, label_smoothing)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        arguments = (x.flatten(0, 1), head.weight, targets.flatten(), label_smoothing, chunks)
        return ChunkedCrossEntropy.apply(*arguments) / (targets != -100).sum().clamp(min=1)

    def loss_chunks(self, tokens):
        """The number of chunks for the loss of so many tokens: 1 if the vocabulary is small or
        the head is more than a matrix."""
        rows = self.head.out_features
        plain = type(self.head) is nn.Linear and self.head.bias is None
        if rows < LARGE_VOCAB or not plain:
            return 1
        return min(MAX_CHUNKS, -(-tokens * rows // CHUNK_LOGITS))

    def describe(self):
        """The shape in words, for the plan."""
        config = self.config
        return f"{config.n_layer} x {config.n_embd} wide, {config.n_head} heads"

    def num_params(self):
        """Learnable numbers, embeddings and head included."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self):
        """FLOPs to train on one token at full context: 6 per weight of a matrix product, plus
        12 * n_layer * C * block_size for attention (Chowdhery et al. 2022, "PaLM", appendix B). By
        convention the masked half counts, and what `grad_checkpoint` recomputes does not.
        """
        config = self.config
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return 6 * weights + 12 * config.n_layer * config.n_embd * config.block_size

    def activation_memory(self, micro_batch, dtype, device_type):
        """Peak bytes of an uncompiled step on micro_batch sequences, without the float32 weights,
        gradients and moments. dtype: "float32", or the autocast dtype."""
        config = self.config
        C, T, V = config.n_embd, config.block_size, self.head.out_features
        dropout = config.dropout > 0
        tokens = micro_batch * T
        width = 4 if dtype == "float32" else 2  # bytes of an activation

        # Numbers that autograd keeps per token. In a block: the inputs of both norms (2 C), of qkv
        # and up (2 C), qkv's output (3 C), normalized q, k (2 C), the output of attention (C). In
        # the MLP: both halves, SiLU's output, the product. Per head: two float32 sums or, without a
        # fused kernel, T weights, and a copy of v. Dropout keeps a mask for each tensor it drops.
        plain_attention = device_type == "cpu" and (dropout or T <= PLAIN_ATTENTION_MAX)
        hidden = self.blocks[0].mlp.down.in_features
        block = (10 + plain_attention + 2 * dropout) * C + 4 * hidden
        block += config.n_head * (T * (1 + 2 * dropout) if plain_attention else 2)
        extra = len(self.extra_heads)  # each has a copy of its input
        ends = (4 + dropout + extra) * C  # the input embedding, and the last norm with its input
        if device_type == "cuda" and width == 2:  # where norms keep their inputs as float32 copies
            block += 6 * C
            ends += C
        kept = config.n_layer * block
        recomputed = 0
        n_hidden = sum(weight.numel() for weight in self.blocks.parameters())
        n_cast = n_hidden + V * C  # weights of which autocast's copy is there
        if is_sharded(self):  # blocks are gathered in that dtype: plumbing/memory.py counts them
            n_hidden, n_cast = 0, V * C
        if config.grad_checkpoint:  # the input of every block, and one whole block at a time
            kept = config.n_layer * C
            recomputed = block - C
            n_cast = n_hidden // config.n_layer + V * C

        # Memory peaks at the gradients in the last MLP (3 C), or at the float32 softmax over the
        # vocabulary with its gradients (12 bytes per logit, 14 with a cast). In a chunked loss the
        # latter is in the forward pass, with all of autocast's copies and the head's gradients.
        at_block = tokens * (ends + kept + recomputed + 3 * C) * width
        at_head = tokens * (ends + kept) * width
        if (chunks := self.loss_chunks(tokens)) == 1:
            at_head += (12 + 4 * extra) * tokens * V
        else:
            at_head += (16 - width) * tokens * V // chunks + (2 * width + 4 * extra) * V * C
            at_head += 0 if width == 4 else 2 * (n_hidden + V * C - n_cast)
        return max(at_block, at_head) + (0 if width == 4 else 2 * n_cast)


def build_model(knobs, vocab_size):
    """A GPT of the shape in `knobs`, a mapping such as a run's config. Raises ValueError if it is
    invalid, TypeError if `knobs` lacks a part of it."""
    shape = {field.name: knobs[field.name] for field in fields(GPTConfig) if field.name in knobs}
    return GPT(GPTConfig(**shape | {"vocab_size": vocab_size}))


# ---- any model -----------------------------------------------------------------------------------


@torch.no_grad()
def generate(
    model, tokens, max_new_tokens, block_size, vocab_size, temperature=1.0, top_k=0, generator=None
):
    """Continues tokens (B, T), yielding one (B, 1) tensor of new ids at a time.

    model: any module, in eval mode, for which model(tokens) returns logits (B, T, vocab_size or
    more). It sees the last `block_size` tokens. temperature=0 takes the likeliest token; top_k=0
    samples from all. Raises ValueError if either is negative.
    """
    if temperature < 0 or top_k < 0:
        raise ValueError(f"temperature={temperature} and top_k={top_k} must not be negative")
    for _ in range(max_new_tokens):
        logits = model(tokens[:, -block_size:])[:, -1, :vocab_size].float()
        if 0 < top_k < logits.size(-1):
            lowest_kept = logits.topk(top_k).values[:, -1:]
            logits = logits.masked_fill(logits < lowest_kept, -math.inf)
        if temperature == 0:
            new = logits.argmax(-1, keepdim=True)
        else:
            new = F.softmax(logits / temperature, dim=-1).multinomial(1, generator=generator)
        tokens = torch.cat((tokens, new), dim=1)
        yield new


class Muon(torch.optim.Optimizer):
    """Momentum with an orthogonalized update (Jordan 2024), as large as AdamW's (Liu et al. 2025).

    Like torch.optim.Muon(adjust_lr_fn="match_rms_adamw"), but in float32 where a CPU only emulates
    bfloat16, which takes a hundred times as long. weights: matrices.
    """

    moments = 1  # numbers kept per weight, for plumbing/memory.py

    def __init__(self, weights, lr, momentum, weight_decay):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(weights, defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                if not self.state[weight]:
                    self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
                average = self.state[weight]["momentum_buffer"]
                average.lerp_(weight.grad, 1 - group["momentum"])
                update = orthogonal(weight.grad.lerp(average, group["momentum"]))  # Nesterov
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-0.2 * group["lr"] * math.sqrt(max(weight.shape)))


def orthogonal(matrix):
    """`matrix` with singular values near 1, by five Newton-Schulz steps (Jordan 2024)."""
    emulated = matrix.is_cpu and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    x = matrix if emulated else matrix.bfloat16()
    x = x.T if x.size(0) > x.size(1) else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return x.T if matrix.size(0) > matrix.size(1) else x


def configure_optimizers(model, optimizer, lr, weight_decay, beta1, beta2, momentum, device_type):
    """The optimizers for `model`, any module, as a list of one, or two for "muon".

    optimizer: "adamw" (Loshchilov & Hutter 2019), "adam" (Kingma & Ba 2015; decays through the
    gradient), "sgd", "momentum" (SGD with momentum), or "muon" (Muon for hidden matrices, AdamW for
    the rest). Matrices and embeddings decay, vectors do not. Raises ValueError for another name.
    """
    muon_prefix = getattr(model, "muon_prefix", "")
    hidden, outer, vectors = [], [], []
    for name, parameter in model.named_parameters():
        embeds = isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding)
        if parameter.ndim < 2 or name in getattr(model, "undecayed", ()):
            vectors.append(parameter)
        elif parameter.ndim == 2 and not embeds and name.startswith(muon_prefix):
            hidden.append(parameter)
        else:
            outer.append(parameter)

    def groups(decayed):
        return [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]

    fused = device_type in ("cpu", "cuda", "mps")
    adam = {"lr": lr, "betas": (beta1, beta2), "fused": fused}
    if optimizer == "adamw":
        return [torch.optim.AdamW(groups(hidden + outer), **adam)]
    if optimizer == "adam":
        return [torch.optim.Adam(groups(hidden + outer), **adam)]
    if optimizer in ("sgd", "momentum"):
        momentum = momentum if optimizer == "momentum" else 0.0
        fused = fused and not is_sharded(model)  # there is none for FSDP2's DTensors (torch 2.13)
        return [torch.optim.SGD(groups(hidden + outer), lr=lr, momentum=momentum, fused=fused)]
    if optimizer == "muon":
        muon = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        return [
            Muon([{"params": hidden}], **muon),
            torch.optim.AdamW(groups(outer), **adam),
        ]
    raise ValueError(f"optimizer={optimizer!r}: expected adamw, adam, sgd, momentum or muon")


def is_sharded(model):
    return any(hasattr(parameter, "to_local") for parameter in model.parameters())
