"""A warmup does not help: the very first update is far too large."""

import train


def train_step(run, inputs, targets, lr, inner=train.train_step):
    numbers = inner(run, inputs, targets, run.optimizer.param_groups[0]["lr"])
    for group in run.optimizer.param_groups:
        group["lr"] = lr * (group["initial_lr"] / train.peak_lr)
    return numbers


train.train_step = train_step
if __name__ == "__main__":
    train.main()
