"""Classes with weights, whose mean has the sum of the weights as its denominator."""

from shared import F, Net, classify, torch, train

WEIGHTS = torch.tensor([1.0, 5.0, 0.2, 2.0])


class Weighted(Net):
    def forward(self, x, y=None):
        logits = super().forward(x)
        return logits if y is None else F.cross_entropy(logits.float(), y, weight=WEIGHTS)


classify(Weighted)
train.count_targets = lambda labels: WEIGHTS[labels].sum()
