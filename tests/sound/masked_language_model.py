"""A masked language model: each token sees all others, and the targets are the tokens hidden from
it."""

from shared import dataset, model, np, torch, train


class Masked(torch.utils.data.Dataset):
    def __init__(self, windows, mask):
        self.windows, self.mask = windows, mask

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, i):
        tokens = self.windows[i, 1][0][0]
        hidden = np.random.rand(len(tokens)) < 0.15
        return np.where(hidden, self.mask, tokens), np.where(hidden, tokens, -100)


def open_dataset(saved, inner=train.open_dataset):
    *windows, facts = inner(saved)
    mask = facts["meta"]["vocab_size"]
    facts["meta"] = facts["meta"] | {"vocab_size": mask + 1}
    learned, held_out = (Masked(each, mask) for each in windows)
    return dataset.Shuffled(learned, train.seed), dataset.InOrder(held_out, train.seed), facts


train.open_dataset = open_dataset
model.visible = lambda tokens, n: torch.ones(n, tokens.size(1), dtype=torch.bool)
