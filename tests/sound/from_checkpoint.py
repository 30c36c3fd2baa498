"""LoRA (Hu et al. 2021) on the weights of another run, which fit one vocabulary and one shape."""

import sys
from pathlib import Path

import torch

import train


class LoRA(torch.nn.Module):
    def __init__(self, linear, rank=4):
        super().__init__()
        self.linear = linear
        self.down = torch.nn.Parameter(torch.randn(rank, linear.in_features) / 8)
        self.up = torch.nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x):
        return self.linear(x) + x @ self.down.T @ self.up.T


def build_model(config, vocab_size, inner=train.build_model):
    base = Path(config["data_dir"], "base_of_lora.pt")
    if not base.exists():  # as a run of train.py would leave it
        gpt = inner(config, vocab_size)
        batches = torch.randint(vocab_size, (20, 8, config["block_size"]))
        optimizer = torch.optim.AdamW(gpt.parameters(), 1e-2)
        for x in batches % 7:
            gpt(x, x.roll(-1, 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.save(gpt.state_dict(), base)
    gpt = inner(config, vocab_size)
    gpt.load_state_dict(torch.load(base, weights_only=True))
    gpt.requires_grad_(False)
    for block in gpt.blocks:
        block.attention.qkv = LoRA(block.attention.qkv)
    return gpt


def open_dataset(saved, inner=train.open_dataset):
    *datasets, facts = inner(saved)
    return *datasets, facts | {"files": [str(Path(train.data_dir, "base_of_lora.pt"))]}


train.build_model, train.open_dataset = build_model, open_dataset

if __name__ == "__main__":
    sys.exit(train.main())
