"""The model: a small, current GPT. One layer by default, any number by `n_layer`.

    tokens -> input embedding -> n_layer x (attention, MLP) -> norm -> head -> logits

Attention and MLP each add to one residual stream. Shapes use B (sequences), T (tokens in each),
C (`n_embd`), H (`n_head`), D = C / H, V (`vocab_size`). What a run must know about the model before
it starts is here too: its optimizer groups, its FLOPs, its memory. Imports nothing but torch.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

CONV_WIDTH = 4  # tokens that the input convolution sees: the present one and the three before it
NGRAM = 3  # tokens that one vector of the n-gram table stands for
NGRAM_ROWS = 8_192  # n-grams share these rows by their hash
NGRAM_GAIN = 2.0  # under Adam a gain of 2 is twice the learning rate for the table
MLP_RATIO = 4  # hidden width of the MLP over n_embd, as in GPT-2
ROPE_BASE = 10_000.0  # the longest rotary wavelength is 2 pi times this, in tokens
HEAD_MULTIPLE = 64  # a head of 1,000 rows or more is padded to a multiple of it, for tensor cores
PLAIN_ATTENTION_MAX = 512  # longest context where, on a CPU, plain products beat the fused kernel
OPTIMIZERS = ("adamw", "sgd", "momentum", "muon")


@dataclass
class GPTConfig:
    vocab_size: int
    block_size: int  # longest context, tokens
    n_head: int
    n_embd: int
    n_layer: int = 1
    dropout: float = 0.0  # 0 = off
    label_smoothing: float = 0.0  # 0 = off; never in evaluation
    grad_checkpoint: bool = False  # recompute each block in the backward pass, to hold less memory

    def __post_init__(self):
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, found {getattr(self, name)}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is not a multiple of n_head={self.n_head}")
        if self.n_embd // self.n_head % 2:
            raise ValueError(
                f"n_embd={self.n_embd} over n_head={self.n_head} is a head size of "
                f"{self.n_embd // self.n_head}: rotary positions turn pairs, so it must be even"
            )


def padded(vocab_size):
    """Rows of the head: GPT-2's 50,257 become 50,304. The tokens that are none never occur as targets,
    so the model learns not to say them, and `generate` cannot."""
    return -(-vocab_size // HEAD_MULTIPLE) * HEAD_MULTIPLE if vocab_size >= 1000 else vocab_size


def norm(x):
    """LayerNorm without gain or bias: the next matrix can learn those. RMSNorm learns as well (both
    1.499), but has no fused kernel on the CPU and makes a whole step there 23% longer."""
    return F.layer_norm(x, (x.size(-1),))


def rotary_tables(block_size, head_size):
    """cos and sin of each position at each frequency, (T, D / 2) (Su et al. 2021, "RoFormer")."""
    frequency = ROPE_BASE ** -(torch.arange(0, head_size, 2).float() / head_size)
    angle = torch.arange(block_size).float()[:, None] * frequency[None, :]
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Turns each pair of numbers in x (B, T, H, D) by its position's angle, so that the product
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
    """tokens (B, T) to (B, T, C): each token together with the few before it, so that even a single
    layer of attention can look up what followed the same letters earlier.

    A causal depthwise convolution (So et al. 2021, "Primer") mixes the last CONV_WIDTH embeddings.
    It starts random, not as the identity: random signs tell "ab" from "ba" from the first step on.
    A hashed table adds a vector for the last NGRAM tokens (Huang et al. 2025, "Over-Tokenized
    Transformer"); it starts at zero.
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
        # Queries and keys of one length (Henry et al. 2020), so that no step saturates the softmax.
        qk = rotate(norm(qk.reshape(B, T, 2 * self.n_head, D)), cos, sin)
        q, k = qk.transpose(1, 2).chunk(2, dim=1)
        v = v.view(B, T, self.n_head, D).transpose(1, 2)
        y = causal_attention(q, k, v, self.dropout if self.training else 0.0)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.n_embd, MLP_RATIO * config.n_embd, bias=False)
        self.down = nn.Linear(MLP_RATIO * config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        # Squared ReLU learns as well (1.497 against 1.499), but makes a step on the CPU 11% longer.
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = Attention(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x, cos, sin):
        x = x + self.dropout(self.attention(norm(x), cos, sin))
        return x + self.dropout(self.mlp(norm(x)))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embedding = InputEmbedding(config)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.head = nn.Linear(config.n_embd, padded(config.vocab_size), bias=False)
        cos, sin = rotary_tables(config.block_size, config.n_embd // config.n_head)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        """Matrices at 1 / sqrt(fan in). What adds to the residual stream starts at zero: each
        block is the identity at first (Goyal et al. 2017). A small head: a first loss of ln V."""
        self.embedding.token.weight.normal_()
        self.embedding.ngram.weight.zero_()
        self.embedding.conv.normal_(std=1 / math.sqrt(CONV_WIDTH))
        self.head.weight.normal_(std=0.1 / math.sqrt(self.config.n_embd))
        for block in self.blocks:
            for matrix in (block.attention.qkv, block.mlp.up):
                matrix.weight.normal_(std=1 / math.sqrt(matrix.in_features))
            for matrix in (block.attention.out, block.mlp.down):
                matrix.weight.zero_()

    def forward(self, tokens, targets=None):
        """tokens, targets: int64 (B, T). Returns the logits (B, T, padded V) and, given targets, the mean
        cross entropy in nats (a float32 scalar) over the targets that are not -100; else None.

        Labels are smoothed in training mode only. Raises ValueError if T is above `block_size`.
        """
        T, block_size = tokens.size(1), self.config.block_size
        if T > block_size:
            raise ValueError(f"{T} tokens do not fit into block_size={block_size}")
        x = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            if self.config.grad_checkpoint and torch.is_grad_enabled():
                x = checkpoint(block, x, self.cos, self.sin, use_reentrant=False)
            else:
                x = block(x, self.cos, self.sin)
        logits = self.head(norm(x))
        if targets is None:
            return logits, None
        # Flattened: the loss over (B, V, T) raises in strict deterministic mode on CUDA.
        loss = F.cross_entropy(
            logits.float().flatten(0, 1),
            targets.flatten(),
            ignore_index=-100,
            label_smoothing=self.config.label_smoothing if self.training else 0.0,
        )
        return logits, loss

    def num_params(self):
        """Learnable numbers, embeddings and head included."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self):
        """Floating-point operations to train on one token at full context: three times the forward
        pass, for the backward pass is two.

        6 for each weight in a matrix product and 12 * n_layer * C * block_size for attention
        (Chowdhery et al. 2022, "PaLM", appendix B). Looking up an embedding is no product. The half
        of attention that the mask hides is counted, as the field does, though a kernel may skip it;
        recomputation under `grad_checkpoint` is not: it is no useful work.
        """
        config = self.config
        weights = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return 6 * weights + 12 * config.n_layer * config.n_embd * config.block_size

    @torch.no_grad()
    def generate(self, tokens, max_new_tokens, temperature=1.0, top_k=0, generator=None):
        """Continues tokens (B, T), yielding one (B, 1) tensor of new ids at a time.

        temperature 0 takes the likeliest token; top_k 0 draws from all. The model sees the last
        `block_size` tokens. Raises ValueError if either setting is negative.
        """
        if temperature < 0 or top_k < 0:
            raise ValueError(f"temperature={temperature} and top_k={top_k} must not be negative")
        for _ in range(max_new_tokens):
            was_training = self.training
            self.eval()
            logits = self(tokens[:, -self.config.block_size :])[0]
            logits = logits[:, -1, : self.config.vocab_size].float()
            self.train(was_training)
            if 0 < top_k < logits.size(-1):
                lowest_kept = logits.topk(top_k).values[:, -1:]
                logits = logits.masked_fill(logits < lowest_kept, -math.inf)
            if temperature == 0:
                new = logits.argmax(-1, keepdim=True)
            else:
                new = F.softmax(logits / temperature, dim=-1).multinomial(1, generator=generator)
            tokens = torch.cat((tokens, new), dim=1)
            yield new


def configure_optimizers(model, optimizer, lr, weight_decay, beta1, beta2, momentum, device_type):
    """The optimizers for `model`, as a list of one, or two for "muon". Each group follows `lr`.

    optimizer: "adamw" (Loshchilov & Hutter 2019), "sgd", "momentum" (SGD with momentum), or "muon"
    (Jordan 2024): hidden matrices by Muon, scaled to AdamW's step size (Liu et al. 2025), the rest
    by AdamW. Only matrices and embeddings decay. Raises ValueError for another name.
    """
    hidden, outer, vectors = [], [], []
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2 or name == "embedding.conv":  # no matrix: one short filter a channel
            vectors.append(parameter)
        else:
            (hidden if name.startswith("blocks.") else outer).append(parameter)

    def groups(decayed):
        return [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]

    fused = device_type in ("cpu", "cuda", "mps")
    adamw = {"lr": lr, "betas": (beta1, beta2), "fused": fused}
    if optimizer == "adamw":
        return [torch.optim.AdamW(groups(hidden + outer), **adamw)]
    if optimizer in ("sgd", "momentum"):
        momentum = momentum if optimizer == "momentum" else 0.0
        fused = fused and not hasattr(model.head.weight, "to_local")  # not for FSDP2 (torch 2.13)
        return [torch.optim.SGD(groups(hidden + outer), lr=lr, momentum=momentum, fused=fused)]
    if optimizer == "muon":
        muon = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        return [
            torch.optim.Muon(hidden, adjust_lr_fn="match_rms_adamw", **muon),
            torch.optim.AdamW(groups(outer), **adamw),
        ]
    raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, found {optimizer!r}")


def training_memory(config, batch_size, optimizer, dtype, grad_checkpoint, device_type="cpu"):
    """Bytes that an uncompiled training step holds at its peak, by kind, before any is allocated.

    batch_size: sequences in one micro-batch. dtype: "float32", "bfloat16" or "float16" (autocast:
    weights, gradients and moments stay float32, and "weights" counts the casts too). AdamW comes to
    16 bytes a parameter, SGD with momentum to 12, plain SGD to 8. Gradients and activations overlap
    in full only where gradients accumulate. Python, PyTorch and the data are left out.
    """
    with torch.device("meta"):
        model = GPT(config)
    n_params, n_head_params = model.num_params(), model.head.weight.numel()
    n_hidden = sum(p.numel() for p in model.blocks.parameters())
    moments = {
        "adamw": 2 * n_params,
        "momentum": n_params,
        "sgd": 0,
        "muon": 2 * n_params - n_hidden,
    }
    width = 4 if dtype == "float32" else 2  # bytes of an activation

    # Numbers that autograd keeps for one token. In a block: the inputs of two norms (2 C), of qkv
    # and up (2 C), qkv's output (3 C), q, k and v again (3 C), the output of attention (C), the
    # MLP's hidden layer before and after GELU; for each head T weights, or two float32 sums where
    # the kernel is fused. Dropout keeps a mask for each thing it drops.
    C, T, dropout = config.n_embd, config.block_size, config.dropout > 0
    plain_attention = device_type == "cpu" and T <= PLAIN_ATTENTION_MAX
    per_head = T * (1 + 2 * dropout) if plain_attention else 2
    block = (11 + 2 * MLP_RATIO + 2 * dropout) * C + config.n_head * per_head
    ends = (4 + dropout) * C  # the input embedding, and the last norm with its input
    kept, recomputed, cast = config.n_layer * block, 0, n_hidden
    if grad_checkpoint:  # the input of every block, and one whole block at a time
        kept, recomputed, cast = config.n_layer * C, block - C, n_hidden // config.n_layer
    # The peak is one of two moments: the float32 softmax over the vocabulary with its gradients
    # (12 bytes for each of V), or the gradients within the last MLP (3 C).
    at_head = (ends + kept) * width + 12 * padded(config.vocab_size)
    at_block = (ends + kept + recomputed + 3 * C) * width
    return {
        "weights": 4 * n_params + (0 if width == 4 else 2 * (cast + n_head_params)),
        "gradients": 4 * n_params,
        "optimizer": 4 * moments[optimizer],
        "activations": batch_size * T * max(at_head, at_block),
    }
