"""GPT-2 (Radford et al. 2019) on the loop of train.py: learned positions, LayerNorm with gain and
bias, GELU by its tanh approximation, and a head that shares the embedding's weights.

    python examples/gpt2.py --n_layer=4                 # from random weights
    python examples/gpt2.py config/gpt2_124m.py
    python examples/gpt2.py --bias=false --gelu=none    # the model of nanoGPT's recipes
    python examples/gpt2.py config/gpt2_124m.py --init_from=FOLDER/model.safetensors ...

The last starts with weights as Hugging Face publishes GPT-2; the shape must be that of config.json
beside them, but a smaller block_size takes the first positions. The dataset needs the same
vocabulary: python prepare_data.py NAME --input=FILE --tokenizer=gpt2. Names and layout of the
weights here are those of such a file, so sample.py --export writes one, too. It was tried with files
that the library `transformers` wrote, not with the published ones. Of train.py's flags for the
model, block_size, n_layer, n_head, n_embd and dropout have an effect.
"""

import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import plumbing  # noqa: E402
import train  # noqa: E402
from model import Dropout, InvalidShape, accuracy, causal_attention, cross_entropy  # noqa: E402

# In some files: masks of the past, and the embedding once more
NOT_WEIGHTS = (".attn.bias", ".attn.masked_bias", "lm_head.weight")


class Conv1D(nn.Module):
    """A linear layer whose weight is (in, out), as GPT-2's files store it."""

    def __init__(self, n_in, n_out, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_in, n_out))
        self.bias = nn.Parameter(torch.zeros(n_out)) if bias else None

    def forward(self, x):
        return F.linear(x, self.weight.T, self.bias)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, bias = config["n_embd"], config["bias"]
        self.n_head = config["n_head"]
        self.ln_1 = nn.LayerNorm(width, bias=bias)
        self.attn = nn.Module()
        self.attn.c_attn = Conv1D(width, 3 * width, bias)
        self.attn.c_proj = Conv1D(width, width, bias)
        self.ln_2 = nn.LayerNorm(width, bias=bias)
        self.mlp = nn.Sequential()
        self.mlp.c_fc = Conv1D(width, 4 * width, bias)
        self.mlp.gelu = nn.GELU(config["gelu"])
        self.mlp.c_proj = Conv1D(4 * width, width, bias)
        self.dropout = Dropout(config["dropout"])

    def forward(self, x, cache=None):
        heads = self.attn.c_attn(self.ln_1(x)).unflatten(2, (3, self.n_head, -1))  # (B, T, 3, H, D)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = causal_attention(q, k, v, self.dropout.p if self.training else 0.0, cache)
        x = x + self.dropout(self.attn.c_proj(y.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.mlp(self.ln_2(x)))


class GPT2(nn.Module):
    muon_prefix = "h."  # Muon trains the matrices whose names begin with this

    def __init__(self, config, vocab_size):
        super().__init__()
        width = config["n_embd"]
        if width % config["n_head"]:
            raise InvalidShape(f"--n_embd={width}: expected a multiple of --n_head")
        self.wte = nn.Embedding(vocab_size, width)
        self.wpe = nn.Embedding(config["block_size"], width)
        self.dropout = Dropout(config["dropout"])
        self.h = nn.ModuleList(Block(config) for _ in range(config["n_layer"]))
        self.ln_f = nn.LayerNorm(width, bias=config["bias"])
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                # so many add up in the residual stream
                terms = 2 * len(self.h) if name.endswith("c_proj.weight") else 1
                nn.init.normal_(weight, std=0.02 / math.sqrt(terms))
        self.register_load_state_dict_pre_hook(adapt)

    @property
    def blocks(self):
        """What generate() keeps keys and values of, and --shard=true gathers one at a time."""
        return self.h

    def forward(self, inputs, targets=None, last_only=False, cache=None):
        """As model.GPT.forward(): the logits, or with targets their mean cross entropy."""
        positions = torch.arange(inputs.size(1), device=inputs.device)
        first = -1 if cache and cache[0] else 0
        x = self.dropout(self.wte(inputs) + self.wpe(positions))[:, first:]
        for block in self.h:
            x = block(x, cache)
        x = self.ln_f(x[:, -1:] if last_only else x)
        logits = F.linear(x, self.wte.weight)
        if targets is None:
            return logits
        loss = cross_entropy(logits, targets)
        return loss if self.training else (loss, {"accuracy": accuracy(logits, targets)})

    def flops_per_token(self):
        """As model.GPT.flops_per_token: the embedding counts once, for the head."""
        weights = sum(weight.numel() for weight in [*self.h.parameters(), self.wte.weight])
        return 6 * weights + 12 * len(self.h) * self.wpe.weight.numel()


def adapt(model, weights, *_):
    """Make of the weights in a file of Hugging Face, {name: tensor}, those of `model`."""
    for name in [*weights]:
        tensor = weights.pop(name)
        if not name.endswith(NOT_WEIGHTS):
            weights[name.removeprefix("transformer.")] = tensor
    weights["wpe.weight"] = weights["wpe.weight"][: len(model.wpe.weight)]


train.knob("bias", True, "in linear layers and LayerNorm; false = none, as nanoGPT's recipes")
train.knob("gelu", "tanh", "tanh | none; how it is approximated; none = as nanoGPT")
train.__doc__ = __doc__
train.build_model = GPT2

if __name__ == "__main__":
    plumbing.exit_process(train.main())
