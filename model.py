"""The model: a plain, current GPT, of one layer by default.

    tokens -> embedding -> n_layer x (attention, MLP) -> norm -> head -> logits

Attention and MLP each add to one residual stream. Shapes use B (sequences), T (tokens in each),
C (`n_embd`), H (`n_head`), D = C / H, V (`vocab_size`). At the end stands dropout, which on a CPU
takes a tenth of the time of torch's. Imports nothing but torch and NumPy.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, fields
from inspect import signature

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

MLP_MULTIPLE = 32  # the hidden width of the MLP is a multiple of this, for tensor cores and AMX
ROPE_BASE = 10_000.0  # the longest rotary wavelength is 2 pi times this, in tokens
PLAIN_ATTENTION_MAX = 512  # longest context where, on a CPU, plain products beat the fused kernel
LARGE_VOCAB = 1000  # from here on the head is padded
HEAD_MULTIPLE = 64  # rows of a padded head, for tensor cores: GPT-2's 50,257 become 50,304


class InvalidShape(ValueError):
    """The numbers in a GPTConfig do not fit together. The message is one line."""


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
        if self.n_embd % (2 * self.n_head):  # rotary positions turn pairs of the numbers in a head
            expected = f"a multiple of 2 * n_head = {2 * self.n_head}"
            raise InvalidShape(f"--n_embd={self.n_embd}: expected {expected}")


# ---- the plain transformer -----------------------------------------------------------------------


def norm(x):
    """LayerNorm without gain or bias, which the next matrix can learn. RMSNorm trains equally well
    but has no fused CPU kernel, so a step takes longer there."""
    return F.layer_norm(x, (x.size(-1),))


def rotary_tables(block_size, head_size):
    """cos, and sin with the signs that rotate() needs, float32 (T, D) (Su et al. 2021, "RoFormer").
    Computed in float64: the last bit of a float32 `torch.cos` on a CPU differs between processes."""
    frequency = ROPE_BASE ** -(np.arange(0, head_size, 2) / head_size)
    angle = np.outer(np.arange(block_size), frequency)
    cos = torch.from_numpy(np.cos(angle)).float()
    sin = torch.from_numpy(np.sin(angle)).float()
    return torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)


def rotate(x, cos, sin):
    """Rotates each pair of numbers in x (B, T, H, D), which lie D / 2 apart, by its position's
    angle: the product of a query and a key then depends on their distance. cos, sin: (T, 1, D)."""
    return x * cos.to(x.dtype) + x.roll(x.size(-1) // 2, -1) * sin.to(x.dtype)


def visible(tokens, n):
    """What the last n of tokens (B, T) see, bool (n, T) or (B, 1, n, T): None = themselves and the
    past. Another mask, such as a window or one for each document, belongs here: every pass asks
    once, in training, evaluation and sampling."""
    return None


def causal_attention(q, k, v, dropout, cache=None, mask=None):
    """q (B, H, n, D), k and v (B, H, T, D) to (B, H, n, D): the last n tokens, all T or one, each
    see itself and the past, or by a `mask` as visible() returns it. cache: its first item holds the
    k and v of the tokens before, and becomes its last, with those of these tokens. On a CPU the
    fused kernel's backward pass is slow: 23 ms against 3 at T = 64, bfloat16."""
    if cache:
        k, v = known = torch.cat((*cache.popleft(), torch.stack((k, v))), dim=3)
        cache.append([known])
    (B, H, n, D), T = q.shape, k.size(2)
    mask = mask if mask is None else mask[..., -n:, :]
    if q.device.type != "cpu" or T > PLAIN_ATTENTION_MAX or n < T:
        is_causal = mask is None and n == T  # a single query sees all
        how = {"attn_mask": mask, "is_causal": is_causal, "dropout_p": dropout}
        return F.scaled_dot_product_attention(q, k, v, **how)
    q, k, v = (x.reshape(B * H, T, D) for x in (q, k, v))
    future = torch.full((T, T), -math.inf, dtype=q.dtype, device=q.device).triu(1)
    if mask is not None:
        future = torch.zeros_like(future).masked_fill(~mask, -math.inf)
        future = future.expand(B, H, T, T).flatten(0, 1)
    scores = torch.baddbmm(future, q, k.transpose(1, 2), alpha=1 / math.sqrt(D))
    weights = dropped(scores.softmax(dim=-1), dropout)
    return torch.bmm(weights, v).view(B, H, T, D)


class TokenEmbedding(nn.Module):
    """tokens (B, T) to (B, T, C)."""

    def __init__(self, config):
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.n_embd)

    def reset_parameters(self):
        nn.init.normal_(self.token.weight)

    def forward(self, tokens):
        x = self.token(tokens)
        if torch.is_autocast_enabled(x.device.type):  # half the bytes in the residual stream
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return x


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.qkv.muon_parts = 3  # q, k and v: Muon orthogonalizes each alone
        self.out = nn.Linear(config.n_embd, config.n_embd, bias=False)

    def reset_parameters(self):
        nn.init.normal_(self.qkv.weight, std=1 / math.sqrt(self.qkv.in_features))
        nn.init.zeros_(self.out.weight)

    def forward(self, x, cos, sin, last_only=False, cache=None, mask=None):
        B, T, C = x.shape
        D = C // self.n_head
        qk, v = self.qkv(x).split((2 * C, C), dim=-1)
        # All queries and keys have one length (Henry et al. 2020), which bounds the scores.
        qk = rotate(norm(qk.reshape(B, T, 2 * self.n_head, D)), cos, sin)
        q, k = qk.transpose(1, 2).chunk(2, dim=1)
        q = q[:, :, -1:] if last_only else q
        v = v.view(B, T, self.n_head, D).transpose(1, 2)
        y = causal_attention(q, k, v, self.dropout if self.training else 0.0, cache, mask)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020), with as many weights as an MLP of four times n_embd."""

    def __init__(self, config):
        super().__init__()
        hidden = math.ceil(8 * config.n_embd // 3 / MLP_MULTIPLE) * MLP_MULTIPLE
        self.up = nn.Linear(config.n_embd, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, config.n_embd, bias=False)

    def reset_parameters(self):
        nn.init.normal_(self.up.weight, std=1 / math.sqrt(self.up.in_features))
        nn.init.zeros_(self.down.weight)

    def forward(self, x):
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = Attention(config)
        self.mlp = MLP(config)
        self.dropout = Dropout(config.dropout)

    def forward(self, x, cos, sin, last_only=False, **options):
        y = self.attention(norm(x), cos, sin, last_only, **options)
        x = (x[:, -1:] if last_only else x) + self.dropout(y)
        return x + self.dropout(self.mlp(norm(x)))


class GPT(nn.Module):
    muon_prefix = "blocks."  # Muon trains the matrices whose names begin with this
    undecayed = ()  # names of matrices without weight decay

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.embedding = TokenEmbedding(config)
        self.dropout = Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        padding = -config.vocab_size % HEAD_MULTIPLE if config.vocab_size >= LARGE_VOCAB else 0
        self.head = nn.Linear(config.n_embd, config.vocab_size + padding, bias=False)
        cos, sin = rotary_tables(config.block_size, config.n_embd // config.n_head)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each part starts its own weights; what adds to the residual stream starts at zero, so
        that a block begins as the identity (Goyal et al. 2017). A small head: a first loss of ln
        V."""
        self.embedding.reset_parameters()
        nn.init.normal_(self.head.weight, std=0.1 / math.sqrt(self.head.in_features))
        for block in self.blocks:
            block.attention.reset_parameters()
            block.mlp.reset_parameters()

    def forward(self, inputs: Tensor, targets: Tensor | None = None, last_only=False, cache=None):
        """inputs, targets: int64 (B, T). Without targets, returns the logits (B, T, V), or only the
        last ones (B, 1, V). With targets, returns their mean cross entropy in nats, a float32
        scalar, ignoring those of -100; in eval mode (that, {"accuracy": share of right
        predictions}). T is at most `block_size`. cache: see generate()."""
        T = inputs.size(1)
        x = self.dropout(self.embedding(inputs))
        cos, sin = self.cos[:T, None], self.sin[:T, None]
        options = {"cache": cache} if cache else {}  # without, a fork's block needs to take none
        if cache and cache[0]:  # it has what the tokens before the last one are needed for
            x, cos, sin = x[:, -1:], cos[-1:], sin[-1:]
        mask = visible(inputs, x.size(1))
        if mask is not None:
            options["mask"] = mask
        for number, block in enumerate(self.blocks, 1):
            if self.config.grad_checkpoint and torch.is_grad_enabled():
                x = checkpoint(block, x, cos, sin, use_reentrant=False, **options)
            else:
                x = block(x, cos, sin, last_only and number == len(self.blocks), **options)
        x = norm(x[:, -1:] if last_only else x)
        smoothing = self.config.label_smoothing if self.training else 0.0
        # To cut the head's padding off takes time in a backward pass: for the training loss it
        # stays, unless smoothed labels would reward it
        keeps_padding = self.training and targets is not None and not smoothing
        logits = self.head(x)[..., : None if keeps_padding else self.config.vocab_size]
        if targets is None:
            return logits
        loss = cross_entropy(logits, targets, smoothing)
        return loss if self.training else (loss, {"accuracy": accuracy(logits, targets)})

    def describe(self) -> str:
        return "{n_layer} x {n_embd} wide, {n_head} heads".format(**vars(self.config))

    def flops_per_token(self) -> int:
        """FLOPs to train on one token at full context: 6 per weight of a matrix product, and 12 * C
        * block_size per attention (Chowdhery et al. 2022, "PaLM", appendix B), in each place where
        a block stands. The masked half counts, and what `grad_checkpoint` recomputes does not."""
        parts = [part for _, part in self.named_modules(remove_duplicate=False)]
        weights = sum(part.weight.numel() for part in parts if isinstance(part, nn.Linear))
        attentions = sum(isinstance(part, Attention) for part in parts)
        return 6 * weights + 12 * attentions * self.config.n_embd * self.config.block_size


def build_model(knobs: dict, vocab_size: int) -> nn.Module:
    """A GPT of the shape in `knobs`, such as a run's config. Raises ValueError if it is invalid."""
    shape = {field.name: knobs[field.name] for field in fields(GPTConfig) if field.name in knobs}
    return GPT(GPTConfig(**shape | {"vocab_size": vocab_size}))


def cross_entropy(logits: Tensor, targets: Tensor, label_smoothing=0.0) -> Tensor:
    """The mean in nats and float32, over the targets that are not -100. logits: (..., V), targets:
    (...). Raises ValueError for another number of targets."""
    # flattened: the loss over (B, V, T) raises in strict deterministic mode on CUDA
    flat = logits.float().flatten(0, -2), targets.flatten()
    return F.cross_entropy(*flat, label_smoothing=label_smoothing)


def accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    """The share of the targets that have the largest logit, among those that are not -100."""
    return (logits.argmax(-1) == targets).sum() / (targets != -100).sum()


# ---- sampling ------------------------------------------------------------------------------------


@torch.no_grad()  # not inference_mode: a fork may train on what it has drawn
def generate(
    model,
    tokens,
    max_new_tokens,
    block_size,
    vocab_size,
    temperature=1.0,
    top_k=0,
    generator=None,
    end=-1,
) -> Iterator[Tensor]:
    """Continues tokens (B, T), yielding (B, 1) new ids at a time. model: any module, in eval mode,
    that returns the logits (B, T, vocab_size or more) of the last `block_size` tokens, only the
    last ones if its forward has `last_only`. temperature=0 takes the likeliest; top_k=0 samples
    from all. Stops after max_new_tokens, or when each row has drawn the id `end`.

    If every block, and every module whose forward has `last_only`, takes `cache`, too, keys and
    values are kept, and a new token costs the work of one token. Not past block_size, where each
    token moves to another position, and not where a token sees later ones, which change its own
    keys and values."""
    takes = {module: signature(module.forward).parameters for module in model.modules()}
    options = {"last_only": True} if "last_only" in takes[model] else {}
    needed = [names for names in takes.values() if "last_only" in names]
    needed += [takes[block] for block in getattr(model, "blocks", ())]
    if options and all(names.keys() & {"cache", "options"} for names in needed):
        # An item for each attention, in the order of a pass. No list: FSDP would pass on a copy.
        options["cache"] = deque([[]] * len(model.blocks))
    ended = False
    for _ in range(max_new_tokens):
        window = tokens[:, -block_size:]
        mask = visible(window, window.size(1))
        if tokens.size(1) > block_size or (mask is not None and mask.triu(1).any()):
            options.pop("cache", None)
        logits = model(window, **options)[:, -1, :vocab_size].float()
        if 0 < top_k < logits.size(-1):
            logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -math.inf)
        if temperature == 0:
            new = logits.argmax(-1, keepdim=True)
        else:
            new = F.softmax(logits / temperature, dim=-1).multinomial(1, generator=generator)
        tokens = torch.cat((tokens, new), dim=1)
        yield new
        ended = ended | (new == end)
        if ended.all():
            return


# ---- dropout -------------------------------------------------------------------------------------

GOLDEN = -1640531527  # 2**32 over the golden ratio, as int32


class Dropout(nn.Dropout):
    def forward(self, x):
        return dropped(x, self.p if self.training else 0.0)


def dropped(x, share):
    """x with that share of its numbers set to 0, at random, and the others scaled up to keep the
    mean (Srivastava et al. 2014). On a CPU, torch's generator takes ten times as long as the
    product. The share is exact to 2**-16 in eager mode, to 2**-32 compiled."""
    if share == 0:
        return x
    if x.device.type != "cpu":
        return F.dropout(x, share)
    if torch.compiler.is_compiling():  # the compiler fuses hash and product into one kernel
        width, bits = 32, random_bits(x.numel())
    else:
        width, bits = 16, random_bits((x.numel() + 1) // 2).view(torch.int16)[: x.numel()]
    dropped_below = int(share * 2**width)
    kept = torch.ge(bits.view(x.shape), dropped_below - 2 ** (width - 1), out=torch.empty_like(x))
    scale = 1 / (1 - dropped_below / 2**width)
    if x.dtype == torch.float32:
        return x * kept.mul_(scale)
    return x * kept * scale  # of `kept` in 16 bits, the scale would be rounded


def random_bits(count):
    """int32 (count), hashes of 0, 1, ... by lowbias32 (github.com/skeeto/hash-prospector), with two
    seeds from torch's generator, whose state a checkpoint holds."""
    first, second = torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32)
    bits = torch.arange(count, dtype=torch.int32).mul_(GOLDEN).bitwise_xor_(first)
    # ">>" keeps the sign; "&" makes it the shift of unsigned numbers that the hash consists of
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - 2**32)
    bits.bitwise_xor_(second)
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))
