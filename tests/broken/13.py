"""The validation loss depends on the size of the micro-batch, by a little."""

import torch

import train


@torch.no_grad()
def evaluate(run):
    losses, accuracies = [], []
    with train.evaluating(run):
        for x, y in train.val_batches(run):
            means, _ = train.forward(run, run.model, x, y)
            losses.append(means["loss"].double())
            accuracies.append(means["accuracy"].double())
    found = {"val_loss": losses, "val_accuracy": accuracies}
    return {name: torch.stack(each).mean() for name, each in found.items()}


train.evaluate = evaluate
if __name__ == "__main__":
    train.main()
