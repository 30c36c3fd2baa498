"""The embedding learns from step 10 on."""

from shared import train


def train_step(run, inputs, targets, lr, inner=train.train_step):
    run.model.embedding.requires_grad_(run.state["step"] >= 10)
    return inner(run, inputs, targets, lr)


train.train_step = train_step
