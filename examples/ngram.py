"""The GPT of model.py with two extras at its input, by which each token knows the few before it, so
that even one layer of attention can look up what followed the same letters earlier. train.py's
flags work here, and so do the tools, with examples/ngram.py as a word.

    python examples/ngram.py config/shakespeare_fast.py
    python examples/ngram.py config/shakespeare_extras.py --conv_width=1    # the table alone

This file replaces model.TokenEmbedding, adds two knobs, and calls train.main().
"""

import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import model  # noqa: E402
import plumbing  # noqa: E402
import train  # noqa: E402

NGRAM = 3  # tokens that one vector of the table stands for


class ContextEmbedding(model.TokenEmbedding):
    """tokens (B, T) to (B, T, C). conv_width: a causal depthwise convolution of that many tokens (So
    et al. 2021, "Primer"); its random start tells "ab" from "ba". ngram_rows: a table has a vector
    for the last NGRAM tokens, by their hash (Huang et al. 2025, "Over-Tokenized Transformer"). What
    is off has no parameter and draws no random number."""

    def __init__(self, config):
        super().__init__(config)
        self.ngram_rows, self.conv_width = train.ngram_rows, train.conv_width
        if self.ngram_rows:
            self.ngram = nn.Embedding(self.ngram_rows, config.n_embd)
        if self.conv_width > 1:  # row 0: the present token
            self.conv = nn.Parameter(torch.empty(self.conv_width, config.n_embd))

    def reset_parameters(self):
        super().reset_parameters()
        if self.ngram_rows:
            nn.init.zeros_(self.ngram.weight)
        if self.conv_width > 1:
            nn.init.normal_(self.conv, std=1 / math.sqrt(self.conv_width))

    def forward(self, tokens):
        x = super().forward(tokens)
        if self.conv_width > 1:
            past, conv = F.pad(x, (0, 0, self.conv_width - 1, 0)), self.conv.to(x.dtype)
            x = x * conv[0]
            for lag in range(1, self.conv_width):
                x = torch.addcmul(x, past[:, self.conv_width - 1 - lag : -lag], conv[lag])
        if self.ngram_rows:
            x = x + self.ngram(self.ngram_row(tokens)).to(x.dtype)
        return x

    def ngram_row(self, tokens):
        """The row of the table for each position, (B, T), by a polynomial hash within 64 bits."""
        past = F.pad(tokens + 1, (NGRAM - 1, 0))  # 0 stands for "before the first token"
        row = torch.zeros_like(tokens)
        for token in past.unfold(1, NGRAM, 1).unbind(-1):
            row = (row * 1_000_003 + token) % 2_147_483_647
        return row % self.ngram_rows


train.__doc__ = __doc__
train.knob("ngram_rows", 8192, "of a table of hashed 3-grams at the input; 0 = off")
train.knob("conv_width", 4, "tokens that a convolution mixes at the input; 1 = off")
model.TokenEmbedding = ContextEmbedding
model.GPT.undecayed = ("embedding.conv",)  # a short filter per channel, no matrix

if __name__ == "__main__":
    plumbing.exit_process(train.main())
