"""Lower rates for lower layers, no decay on the embedding."""
# flags: --optimizer=adamw

from shared import torch, train


def configure_optimizer(gpt, knobs, device_type):
    groups = []
    for key, weight in gpt.named_parameters():
        decays = weight.ndim > 1 and "token" not in key
        groups.append(
            {
                "params": [weight],
                "weight_decay": knobs["weight_decay"] if decays else 0.0,
                "lr": knobs["peak_lr"] * (0.5 if key.startswith("blocks.0.") else 1.0),
            }
        )
    return torch.optim.AdamW(groups, knobs["peak_lr"], (knobs["beta1"], knobs["beta2"]))


train.configure_optimizer = configure_optimizer
