"""Points to which noise is added while they are read; the best is the one with most right answers."""

from shared import F, Net, classify, dataset, facts, np, points, train


class Moved(list):
    def __getitem__(self, number):
        x, label = super().__getitem__(number)
        return x + 0.1 * np.random.randn(6).astype(np.float32), label


class Counting(Net):
    def forward(self, x, y=None):
        logits = super().forward(x)
        if y is None:
            return logits
        accuracy = (logits.argmax(-1) == y).float().mean()
        return F.cross_entropy(logits.float(), y), {"accuracy": accuracy}


def open_dataset(saved):
    train_data = dataset.Shuffled(Moved(points()), train.seed)
    return train_data, dataset.InOrder(points(100, seed=1), train.seed), facts(4)


classify(Counting)
train.open_dataset, train.best_metric = open_dataset, "-val_accuracy"
