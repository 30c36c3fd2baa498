"""Two texts with shares of 3 to 1, here the halves of one; an evaluation row has both losses."""

from shared import np, torch, train


class Mixture(torch.utils.data.Dataset):
    def __init__(self, texts):
        self.texts = texts

    def __len__(self):
        return 4 * (len(self.texts[0]) // 3)

    def __getitem__(self, batch):
        windows = []
        for place in range(batch[0], sum(batch)):
            block, n = divmod(place, 4)
            text, place = (0, 3 * block + n) if n < 3 else (1, block)
            windows.append(self.texts[text][place, 1])
        return tuple(map(np.concatenate, zip(*windows, strict=True)))


def open_dataset(saved, inner=train.open_dataset):
    train_data, val_data, facts = inner(saved)
    size, halves = train.block_size, np.array_split(train_data.tokens, 2)
    texts = [train.ShuffledWindows(half, size, train.seed) for half in halves]
    parts = [train.OrderedWindows(half, size) for half in np.array_split(val_data.tokens, 2)]
    meta = {name: facts["meta"][name] for name in facts["meta"] if not name.startswith("val_")}
    return Mixture(texts), {"first": parts[0], "second": parts[1]}, facts | {"meta": meta}


train.open_dataset = open_dataset
