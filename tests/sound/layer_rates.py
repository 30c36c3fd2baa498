"""Lower rates for lower layers, no decay on the embedding; ALiBi in place of rotary positions."""

import sys

import torch

import model
import train


def rotate(x, cos, sin):
    return x


def attention(q, k, v, dropout):
    T, n = k.size(2), q.size(2)
    distance = torch.arange(T - n, T, device=q.device)[:, None] - torch.arange(T, device=q.device)
    slopes = 2.0 ** -torch.arange(1, q.size(1) + 1, device=q.device).to(q.dtype)
    bias = -slopes[:, None, None] * distance.to(q.dtype)
    bias = bias.masked_fill(distance < 0, float("-inf"))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, bias, dropout)


def configure_optimizers(gpt, name, lr, weight_decay, beta1, beta2, *rest):
    groups = []
    for key, weight in gpt.named_parameters():
        decays = weight.ndim > 1 and "token" not in key
        scale = 0.5 if key.startswith("blocks.0.") else 1.0
        decay = weight_decay if decays else 0.0
        groups.append({"params": [weight], "weight_decay": decay, "lr_scale": scale})
    return [torch.optim.AdamW(groups, lr, (beta1, beta2))]


model.rotate, model.causal_attention = rotate, attention
train.configure_optimizers = configure_optimizers
train.optimizer = "adamw"

if __name__ == "__main__":
    sys.exit(train.main())
