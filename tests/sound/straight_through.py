"""Activations of the MLP are rounded; the gradient passes as if they were not (Bengio et al. 2013)."""

import sys

import model
import train


class MLP(model.MLP):
    def forward(self, x):
        y = super().forward(x)
        return y + ((8 * y).round() / 8 - y).detach()


model.MLP = MLP

if __name__ == "__main__":
    sys.exit(train.main())
