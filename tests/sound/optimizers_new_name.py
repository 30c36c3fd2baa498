"""A new --optimizer in the way that README allows: another name, and what it does."""
# flags: --optimizer=rmsprop --peak_lr=1e-3 --min_lr=1e-4

from shared import torch, train


def configure_optimizer(model, knobs, device_type, inner=train.configure_optimizer):
    if knobs["optimizer"] == "rmsprop":
        return torch.optim.RMSprop(model.parameters(), knobs["peak_lr"])
    return inner(model, knobs, device_type)


configure_optimizer.__module__ = "optim"  # as if optim.py were edited
train.configure_optimizer = configure_optimizer
train.CHOICES["optimizer"] += ("rmsprop",)
