"""A frozen first layer that stays in eval mode; noise on the embedding in training (NEFTune)."""

import sys

import torch

import model
import train


class GPT(model.GPT):
    def __init__(self, config):
        super().__init__(config)
        self.blocks[0].requires_grad_(False)
        self.embedding.register_forward_hook(self.add_noise)

    def add_noise(self, embedding, args, x):
        return x + 0.05 * torch.rand_like(x) if self.training else x

    def train(self, mode=True):
        super().train(mode)
        self.blocks[0].eval()
        return self


model.GPT = GPT

if __name__ == "__main__":
    sys.exit(train.main())
