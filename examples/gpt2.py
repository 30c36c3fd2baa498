"""GPT-2 (Radford et al. 2019) on the loop of train.py: learned positions, LayerNorm with gain and
bias, GELU by its tanh approximation, and a head that shares the embedding's weights.

    python examples/gpt2.py --n_layer=4                # the shape by flags, as of train.py
    python examples/gpt2.py config/gpt2_124m.py        # the 124M model, from random weights

Of train.py's flags for the model, block_size, n_layer, n_head, n_embd, dropout and grad_checkpoint
have an effect. Names and shapes of the weights are those of Hugging Face's GPT-2.
"""

import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train  # noqa: E402
from model import Dropout, InvalidShape, causal_attention, cross_entropy  # noqa: E402
from plumbing.cli import run_script  # noqa: E402


class Conv1D(nn.Module):
    """A linear layer whose weight is (in, out), as GPT-2's files store it."""

    def __init__(self, n_in, n_out, std=0.02):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_in, n_out))
        self.bias = nn.Parameter(torch.zeros(n_out))
        nn.init.normal_(self.weight, std=std)

    def forward(self, x):
        return F.linear(x, self.weight.T, self.bias)


class Attention(nn.Module):
    def __init__(self, config, out_std):
        super().__init__()
        width = config["n_embd"]
        self.n_head = config["n_head"]
        self.c_attn = Conv1D(width, 3 * width)
        self.c_proj = Conv1D(width, width, out_std)
        self.dropout = config["dropout"]

    def forward(self, x):
        heads = self.c_attn(x).unflatten(2, (3, self.n_head, -1))  # (B, T, 3, H, D)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = causal_attention(q, k, v, self.dropout if self.training else 0.0)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config, out_std):
        super().__init__()
        width = config["n_embd"]
        self.c_fc = Conv1D(width, 4 * width)
        self.c_proj = Conv1D(4 * width, width, out_std)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        out_std = 0.02 / math.sqrt(2 * config["n_layer"])  # of what adds to the residual stream
        self.ln_1 = nn.LayerNorm(config["n_embd"])
        self.attn = Attention(config, out_std)
        self.ln_2 = nn.LayerNorm(config["n_embd"])
        self.mlp = MLP(config, out_std)
        self.dropout = Dropout(config["dropout"])

    def forward(self, x):
        x = x + self.dropout(self.attn(self.ln_1(x)))
        return x + self.dropout(self.mlp(self.ln_2(x)))


class GPT2(nn.Module):
    muon_prefix = "h."  # Muon trains the matrices whose names begin with this

    def __init__(self, config, vocab_size):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(vocab_size, config["n_embd"])
        self.wpe = nn.Embedding(config["block_size"], config["n_embd"])
        self.dropout = Dropout(config["dropout"])
        self.h = nn.ModuleList(Block(config) for _ in range(config["n_layer"]))
        self.ln_f = nn.LayerNorm(config["n_embd"])
        for embedding in (self.wte, self.wpe):
            nn.init.normal_(embedding.weight, std=0.02)

    @property
    def blocks(self):
        """What --shard=true gathers one at a time."""
        return self.h

    def forward(self, inputs, targets=None, last_only=False):
        """inputs, targets: int64 (B, T). The logits (B, T, V), or only the last (B, 1, V); with
        targets their mean cross entropy instead, ignoring those of -100."""
        positions = torch.arange(inputs.size(1), device=inputs.device)
        x = self.dropout(self.wte(inputs) + self.wpe(positions))
        for block in self.h:
            if self.config["grad_checkpoint"] and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        x = self.ln_f(x[:, -1:] if last_only else x)
        logits = F.linear(x, self.wte.weight)
        return logits if targets is None else cross_entropy(logits, targets)

    def flops_per_token(self):
        """As model.GPT.flops_per_token: the embedding counts once, for the head."""
        weights = sum(weight.numel() for weight in self.parameters() if weight.ndim > 1)
        length, width = self.wpe.weight.shape
        return 6 * (weights - length * width) + 12 * len(self.h) * width * length


def build_model(config, vocab_size):
    if config["n_embd"] % config["n_head"]:
        raise InvalidShape(f"--n_embd={config['n_embd']}: expected a multiple of --n_head")
    return GPT2(config, vocab_size)


vars(train).update(__doc__=__doc__, build_model=build_model, out_dir="out/gpt2")

if __name__ == "__main__":
    sys.exit(run_script(train.main))
