"""SGD that divides each gradient by its norm, in place."""

import sys

import torch

import train


class Normalized(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.grad /= weight.grad.norm().clamp(min=1e-8)
        return super().step(closure)


train.configure_optimizers = lambda model, name, lr, *_: [Normalized(model.parameters(), lr)]

if __name__ == "__main__":
    sys.exit(train.main())
