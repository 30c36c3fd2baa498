"""A new --schedule by an edit of lr_at()."""
# flags: --schedule=triangle

from shared import train


def lr_at(step, inner=train.lr_at):
    if train.schedule == "triangle":
        return train.peak_lr * (1 - abs(step % 40 - 20) / 20) + train.min_lr
    return inner(step)


lr_at.__module__ = "train"
train.lr_at = lr_at
train.CHOICES["schedule"] += ("triangle",)
