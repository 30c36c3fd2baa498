"""Schedule-free AdamW (Defazio et al. 2024), as an optimizer of the script's own."""

import sys

import torch

import train


class ScheduleFree(torch.optim.Optimizer):
    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for y in group["params"]:
                if y.grad is None:
                    continue
                state = self.state[y]
                if not state:
                    state.update(z=y.clone(), x=y.clone(), v=torch.zeros_like(y), steps=0)
                state["steps"] += 1
                state["v"].lerp_(y.grad.square(), 0.05)
                size = (state["v"] / (1 - 0.95 ** state["steps"])).sqrt() + 1e-8
                move = y.grad / size + group["weight_decay"] * y
                state["z"].sub_(group["lr"] * move)
                state["x"].lerp_(state["z"], 1 / state["steps"])
                y.copy_(state["z"].lerp(state["x"], 0.9))


def configure_optimizers(model, name, lr, weight_decay, *rest):
    weights = list(model.parameters())
    groups = [
        {"params": [w for w in weights if w.ndim > 1], "weight_decay": weight_decay},
        {"params": [w for w in weights if w.ndim < 2], "weight_decay": 0.0},
    ]
    return [ScheduleFree([group for group in groups if group["params"]], lr)]


train.configure_optimizers = configure_optimizers
train.schedule = "constant"

if __name__ == "__main__":
    sys.exit(train.main())
