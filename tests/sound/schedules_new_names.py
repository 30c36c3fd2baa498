"""A new --schedule and a new --optimizer in the way that README allows: another name, and what it
does."""
# flags: --schedule=triangle --optimizer=rmsprop --peak_lr=1e-3 --min_lr=1e-4

from shared import torch, train


def lr_at(step, inner=train.lr_at):
    if train.schedule == "triangle":
        return train.peak_lr * (1 - abs(step % 40 - 20) / 20) + train.min_lr
    return inner(step)


def configure_optimizer(model, knobs, device_type, inner=train.configure_optimizer):
    if knobs["optimizer"] == "rmsprop":
        return torch.optim.RMSprop(model.parameters(), knobs["peak_lr"])
    return inner(model, knobs, device_type)


# as if these files were edited
lr_at.__module__, configure_optimizer.__module__ = "train", "optim"
train.lr_at, train.configure_optimizer = lr_at, configure_optimizer
train.CHOICES["schedule"] += ("triangle",)
train.CHOICES["optimizer"] += ("rmsprop",)
