"""Lower rates for lower layers, no decay on the embedding."""

import sys

import torch

import train


def configure_optimizers(gpt, name, lr, weight_decay, beta1, beta2, *rest):
    groups = []
    for key, weight in gpt.named_parameters():
        decays = weight.ndim > 1 and "token" not in key
        scale = 0.5 if key.startswith("blocks.0.") else 1.0
        decay = weight_decay if decays else 0.0
        groups.append({"params": [weight], "weight_decay": decay, "lr_scale": scale})
    return [torch.optim.AdamW(groups, lr, (beta1, beta2))]


train.configure_optimizers = configure_optimizers
train.optimizer = "adamw"

if __name__ == "__main__":
    sys.exit(train.main())
