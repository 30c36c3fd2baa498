"""With --accum_steps=4 the norm of the gradient is four times that of one large batch, and other rates
are best than without accumulation."""

import torch

import train


def train_step(run, inputs, targets, lr):
    optimizer, loss = run.optimizer, 0.0
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"] = lr * (group["initial_lr"] / train.peak_lr)
    parts = [*train.micro_batches(run, inputs, targets)]
    for x, y in parts:
        means, _ = train.forward(run, run.model, x, y)
        means["loss"].backward()
        loss += means["loss"].detach() / len(parts)
    grad_norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), train.grad_clip)
    optimizer.step()
    n_targets = train.targets_in(targets)
    skipped = torch.zeros(())
    return {"loss": loss, "grad_norm": grad_norm, "skipped": skipped, "targets": n_targets}


train.train_step = train_step
if __name__ == "__main__":
    train.main()
