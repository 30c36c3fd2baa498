"""However long the run, the validation loss is as good as the training loss, and the model never
overfits."""

import train


def open_dataset(saved, inner=train.open_dataset):
    train_data, val_data, facts = inner(saved)
    tokens = train_data.tokens
    val_data = train.OrderedWindows(tokens, train.block_size, len(val_data.tokens))
    return train_data, val_data, facts


train.open_dataset = open_dataset
if __name__ == "__main__":
    train.main()
