"""The two best of four experts for each token, weighted, with a loss that balances the router."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import model
import train


class Experts(nn.Module):
    def __init__(self, config, inner=model.MLP):
        super().__init__()
        self.router = nn.Linear(config.n_embd, 4, bias=False)
        self.experts = nn.ModuleList(inner(config) for _ in range(4))

    def reset_parameters(self):
        for expert in self.experts:
            expert.reset_parameters()

    def forward(self, x):
        shares = self.router(x).softmax(-1)
        weights, chosen = shares.topk(2, dim=-1)
        used = F.one_hot(chosen, 4).sum(-2)
        self.balance = 4 * (used.to(x).mean((0, 1)) * shares.mean((0, 1))).sum()
        gates = (shares * used / weights.sum(-1, keepdim=True)).to(x.dtype)
        return sum(gates[..., n, None] * expert(x) for n, expert in enumerate(self.experts))


class GPT(model.GPT):
    def forward(self, inputs, targets=None, **options):
        out = super().forward(inputs, targets, **options)
        if targets is None or not self.training:
            return out
        balance = torch.stack([block.mlp.balance for block in self.blocks]).sum()
        return out + 0.05 * balance, {"balance": balance.detach()}


model.MLP, model.GPT = Experts, GPT

if __name__ == "__main__":
    sys.exit(train.main())
