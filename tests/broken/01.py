"""The loss ends far above where it should, and the norm of the gradient is three times as high as it
should be, and does not fall."""

import train


def train_step(run, inputs, targets, lr, inner=train.train_step):
    run.optimizer.zero_grad = lambda set_to_none: None
    return inner(run, inputs, targets, lr)


train.train_step = train_step
if __name__ == "__main__":
    train.main()
