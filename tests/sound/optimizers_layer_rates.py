"""Lower rates for lower layers, no decay on the embedding."""
# flags: --optimizer=adamw

from shared import torch, train


def configure_optimizer(gpt, knobs, device_type):
    groups = []
    for key, weight in gpt.named_parameters():
        decay = knobs["weight_decay"] if weight.ndim > 1 and "token" not in key else 0.0
        rate = knobs["peak_lr"] * (0.5 if key.startswith("blocks.0.") else 1.0)
        groups.append({"params": [weight], "weight_decay": decay, "lr": rate})
    return torch.optim.AdamW(groups, knobs["peak_lr"], (knobs["beta1"], knobs["beta2"]))


train.configure_optimizer = configure_optimizer
