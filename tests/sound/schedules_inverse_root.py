"""An inverse square root after the warmup (Vaswani et al. 2017)."""

from shared import train


def lr_at(step):
    warmup = max(1, train.warmup_steps)
    return train.peak_lr * min((step + 1) / warmup, (warmup / (step + 1)) ** 0.5)


train.lr_at = lr_at
