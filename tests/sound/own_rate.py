"""A learning rate of the script's own: an inverse square root after the warmup."""

import sys

import train


def lr_at(step):
    warmup = max(1, train.warmup_steps)
    return train.peak_lr * min((step + 1) / warmup, (warmup / (step + 1)) ** 0.5)


train.lr_at = lr_at

if __name__ == "__main__":
    sys.exit(train.main())
