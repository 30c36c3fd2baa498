"""Lion (Chen et al. 2023), with a decay that warms up."""

from shared import torch, train


class Lion(torch.optim.Optimizer):
    def __init__(self, weights, lr, decay):
        super().__init__(weights, {"lr": lr, "weight_decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight] or {"momentum": torch.zeros_like(weight), "updates": 0}
                state["updates"] += 1
                decay = group["lr"] * group["weight_decay"] * min(1, state["updates"] / 100)
                update = state["momentum"].lerp(weight.grad, 0.1).sign()
                state["momentum"].lerp_(weight.grad, 0.01)
                weight.mul_(1 - decay).sub_(update, alpha=group["lr"])
                self.state[weight] = state


def configure_optimizer(model, knobs, device_type):
    return Lion(model.parameters(), knobs["peak_lr"], knobs["weight_decay"])


train.configure_optimizer = configure_optimizer
