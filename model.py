"""The model: a small, current GPT. One layer by default, any number by `n_layer`.

    tokens -> embedding -> n_layer x (attention, MLP), each added to the residual stream -> norm -> head

Shapes use B (sequences), T (tokens in a sequence), C (`n_embd`), H (`n_head`), D = C / H, V (`vocab_size`).
Everything a run must know about the model before it starts is here too: its optimizer groups, its
FLOPs and its memory. Imports nothing but torch.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

CONV_WIDTH = 4  # tokens that the short convolution sees: the present one and the three before it
NGRAM = 3  # tokens that one n-gram embedding stands for
NGRAM_ROWS = 16_384  # rows of the n-gram table; n-grams share rows by hash
NGRAM_GAIN = 2.0  # under Adam a gain of 2 doubles the table's learning rate
MLP_RATIO = 4  # hidden width of the MLP over n_embd, as in GPT-2
ROPE_BASE = 10_000.0  # the longest rotary wavelength is 2 pi times this, in tokens


@dataclass
class GPTConfig:
    vocab_size: int
    block_size: int  # longest context, tokens
    n_head: int
    n_embd: int
    n_layer: int = 1
    dropout: float = 0.0  # 0 = off
    label_smoothing: float = 0.0  # 0 = off; training loss only
    grad_checkpoint: bool = (
        False  # recompute each block in the backward pass: less memory, a third more FLOPs
    )

    def __post_init__(self):
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, found {getattr(self, name)}")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is not a multiple of n_head={self.n_head}")
        if self.n_embd // self.n_head % 2:
            raise ValueError(
                f"n_embd / n_head = {self.n_embd} / {self.n_head} = {self.n_embd // self.n_head} is odd; "
                "rotary positions turn pairs, so the head size must be even"
            )


def norm(x):
    """LayerNorm without gain or bias: the next matrix can learn those. (RMSNorm learns as well, but has no fused
    kernel on the CPU: 2.8 ms against 0.8 ms, forward and backward, for 4,096 tokens of width 256.)"""
    return F.layer_norm(x, (x.size(-1),))


def rotary_tables(block_size, head_size):
    """cos and sin of every position times every frequency, each (T, D / 2) (Su et al. 2021, "RoFormer")."""
    frequency = ROPE_BASE ** -(torch.arange(0, head_size, 2).float() / head_size)
    angle = torch.arange(block_size).float()[:, None] * frequency[None, :]
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Turns each pair of numbers in x (B, T, H, D) by its position's angle, so that q . k depends on distance."""
    cos, sin = (table[: x.size(1), None].to(x.dtype) for table in (cos, sin))
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def causal_attention(q, k, v, dropout):
    """q, k, v (B, H, T, D) to (B, H, T, D); each token sees itself and the past.

    At short contexts on a CPU, plain matrix products are several times faster than the fused kernel, whose
    backward pass is slow there: 3 ms against 23 ms at T = 64, 8 against 16 at 256, even at 1,024.
    """
    B, H, T, D = q.shape
    if q.device.type != "cpu" or T > 512:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
    q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
    future = torch.full((T, T), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    scores = torch.baddbmm(future, q, k.transpose(1, 2), alpha=1 / math.sqrt(D))
    weights = F.dropout(scores.softmax(dim=-1), dropout)
    return torch.bmm(weights, v).view(B, H, T, D)


class InputEmbedding(nn.Module):
    """tokens (B, T) to (B, T, C): each token with the few before it, so that even one layer of attention can look
    up what followed the same letters earlier.

    A causal depthwise convolution (So et al. 2021, "Primer") mixes the embeddings of the last CONV_WIDTH tokens.
    Its weights start random, not as the identity: random signs keep "ab" and "ba" apart from the first step.
    A hashed table adds one vector for each NGRAM tokens (Svenstrup et al. 2017; Huang et al. 2025), from zero.
    """

    def __init__(self, config):
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.n_embd)
        self.ngram = nn.Embedding(NGRAM_ROWS, config.n_embd)
        self.conv = nn.Parameter(torch.empty(CONV_WIDTH, config.n_embd))

    def forward(self, tokens):
        T = tokens.size(1)
        x = self.token(tokens)
        if torch.is_autocast_enabled(x.device.type):  # a residual stream of half the bytes
            x = x.to(torch.get_autocast_dtype(x.device.type))
        conv = self.conv.to(x.dtype)
        past = F.pad(x, (0, 0, CONV_WIDTH - 1, 0))
        x = x * conv[0]
        for lag in range(1, CONV_WIDTH):
            start = CONV_WIDTH - 1 - lag
            x = torch.addcmul(x, past[:, start : start + T], conv[lag])
        ngram = self.ngram(self.ngram_row(tokens)).to(x.dtype)
        return torch.add(x, ngram, alpha=NGRAM_GAIN)

    def ngram_row(self, tokens):
        """The row of the n-gram table for each position, (B, T); -1 stands for "before the first token"."""
        T = tokens.size(1)
        past = F.pad(tokens, (NGRAM - 1, 0), value=-1)
        row = torch.zeros_like(tokens)
        for start in range(NGRAM):  # a polynomial hash that cannot overflow 64 bits
            row = (row * 1_000_003 + past[:, start : start + T] + 1) % 2_147_483_647
        return row % NGRAM_ROWS


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.out = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def forward(self, x, cos, sin):
        B, T, C = x.shape
        qk, v = self.qkv(x).split((2 * C, C), dim=-1)
        # Queries and keys of unit scale (Henry et al. 2020, "QK norm"): no learning rate can saturate the softmax.
        qk = rotate(norm(qk.reshape(B, T, 2 * self.n_head, C // self.n_head)), cos, sin)
        q, k = qk.transpose(1, 2).chunk(2, dim=1)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = causal_attention(q, k, v, self.dropout if self.training else 0.0)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.n_embd, MLP_RATIO * config.n_embd, bias=False)
        self.down = nn.Linear(MLP_RATIO * config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        return self.down(
            F.gelu(self.up(x))
        )  # squared ReLU learns as well, and costs 10% of a step more


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
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        cos, sin = rotary_tables(config.block_size, config.n_embd // config.n_head)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        """Matrices at 1 / sqrt(fan in). What is added to the residual stream starts at zero, so that every block
        starts as the identity (Goyal et al. 2017), and the head small, for a first loss of ln V."""
        self.embedding.token.weight.normal_(std=1.0)
        self.embedding.ngram.weight.zero_()
        self.embedding.conv.normal_(std=1 / math.sqrt(CONV_WIDTH))
        self.head.weight.normal_(std=0.1 / math.sqrt(self.config.n_embd))
        for block in self.blocks:
            for matrix in (block.attention.qkv, block.mlp.up):
                matrix.weight.normal_(std=1 / math.sqrt(matrix.in_features))
            for matrix in (block.attention.out, block.mlp.down):
                matrix.weight.zero_()

    def forward(self, tokens, targets=None):
        """tokens, targets: int64 (B, T). Returns logits (B, T, V) and, given targets, the mean cross entropy
        in nats (float32 scalar) over the targets that are not -100; else None.

        Label smoothing counts in training mode only: an evaluation is never smoothed.
        Raises ValueError where T is larger than `block_size`.
        """
        if tokens.size(1) > self.config.block_size:
            raise ValueError(
                f"{tokens.size(1)} tokens do not fit into block_size={self.config.block_size}"
            )
        x = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            if self.config.grad_checkpoint and torch.is_grad_enabled():
                x = checkpoint(block, x, self.cos, self.sin, use_reentrant=False)
            else:
                x = block(x, self.cos, self.sin)
        logits = self.head(norm(x))
        if targets is None:
            return logits, None
        # Flattened to two dimensions: the NLL over more raises in strict deterministic mode on CUDA.
        loss = F.cross_entropy(
            logits.float().view(-1, logits.size(-1)),
            targets.reshape(-1),
            ignore_index=-100,
            label_smoothing=self.config.label_smoothing if self.training else 0.0,
        )
        return logits, loss

    def num_params(self):
        """Learnable numbers, embedding and head included."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self):
        """Floating-point operations to train on one token: forward plus backward, which is twice the forward.

        6 for each weight in a matrix product (a multiplication and an addition, three times) and
        12 * n_layer * n_embd * block_size for attention (Chowdhery et al. 2022, "PaLM", appendix B). Looking up
        an embedding is no product. The causal half of attention is counted although a kernel may skip it, as the
        field does; recomputation under `grad_checkpoint` is not counted: it is not useful work.
        """
        config = self.config
        in_products = sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))
        return 6 * in_products + 12 * config.n_layer * config.n_embd * config.block_size

    @torch.no_grad()
    def generate(self, tokens, max_new_tokens, temperature=1.0, top_k=0, generator=None):
        """Continues tokens (B, T), yielding one (B, 1) tensor of new ids at a time.

        temperature 0 takes the likeliest token; top_k 0 draws from all of them. Only the last `block_size`
        tokens are seen. The same `generator` state gives the same text.
        """
        if temperature < 0 or top_k < 0:
            raise ValueError(f"temperature={temperature} and top_k={top_k} must not be negative")
        for _ in range(max_new_tokens):
            was_training = self.training
            self.eval()
            logits = self(tokens[:, -self.config.block_size :])[0][:, -1].float()
            self.train(was_training)
            if 0 < top_k < logits.size(-1):
                kept = logits.topk(top_k).values[:, -1:]
                logits = logits.masked_fill(logits < kept, -math.inf)
            if temperature == 0:
                new = logits.argmax(-1, keepdim=True)
            else:
                new = F.softmax(logits / temperature, dim=-1).multinomial(1, generator=generator)
            tokens = torch.cat((tokens, new), dim=1)
            yield new


def configure_optimizers(model, optimizer, lr, weight_decay, beta1, beta2, momentum, device_type):
    """The optimizers for `model`, as a list: one, or two for "muon". All follow the `lr` in their param_groups.

    optimizer: "adamw" (Loshchilov & Hutter 2019), "sgd", "momentum" (SGD with momentum), or "muon" (Jordan 2024:
    the hidden matrices, scaled to AdamW's step size; AdamW for the rest). Weight decay falls on matrices and
    embeddings only, never on the vectors of the convolution.
    """
    hidden, outer, vectors = [], [], []
    for name, parameter in model.named_parameters():
        if name == "embedding.conv" or parameter.ndim < 2:
            vectors.append(parameter)
        elif name.startswith(("embedding", "head")):
            outer.append(parameter)
        else:
            hidden.append(parameter)

    def groups(*decayed):
        return [
            {"params": [p for ps in decayed for p in ps], "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]

    fused = device_type in ("cpu", "cuda", "mps")
    betas = (beta1, beta2)
    if optimizer == "adamw":
        return [torch.optim.AdamW(groups(hidden, outer), lr=lr, betas=betas, fused=fused)]
    if optimizer in ("sgd", "momentum"):
        momentum = momentum if optimizer == "momentum" else 0.0
        return [torch.optim.SGD(groups(hidden, outer), lr=lr, momentum=momentum, fused=fused)]
    if optimizer == "muon":
        return [
            torch.optim.Muon(
                hidden,
                lr=lr,
                weight_decay=weight_decay,
                momentum=momentum,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(groups(outer), lr=lr, betas=betas, fused=fused),
        ]
    raise ValueError(f"optimizer must be adamw, sgd, momentum or muon, found {optimizer!r}")


def training_memory(config, batch_size, optimizer, dtype, grad_checkpoint):
    """Bytes that training holds at its peak, by kind, predicted before anything is allocated.

    batch_size: sequences in one micro-batch. dtype: "float32", "bfloat16" or "float16" (autocast: weights,
    gradients and moments stay float32). AdamW in float32 so comes to 16 bytes a parameter, SGD with momentum
    to 12, plain SGD to 8.
    """
    with torch.device("meta"):
        n_params = GPT(config).num_params()
    moments = {"adamw": 2, "sgd": 0, "momentum": 1, "muon": 2}[optimizer]
    width, tokens = (4 if dtype == "float32" else 2), batch_size * config.block_size
    per_block = tokens * config.n_embd * width * (20 + 3 * MLP_RATIO)
    kept = tokens * config.n_embd * 4 * config.n_layer + per_block if grad_checkpoint else 0
    activations = kept or config.n_layer * per_block
    return {
        "weights": 4 * n_params,
        "gradients": 4 * n_params,
        "optimizer": 4 * moments * n_params,
        "activations": activations + tokens * config.vocab_size * 12,
    }
