"""The losses differ in the third digit from those of another program with the same seed and knobs, from
the second step on."""

import train


def lr_at(step, inner=train.lr_at):
    return inner(step + 1)


train.lr_at = lr_at
if __name__ == "__main__":
    train.main()
