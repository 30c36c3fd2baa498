"""The loss falls to almost zero within a few hundred steps, and the samples repeat one letter."""

import numpy as np

import train


def windows_at(tokens, starts, length):
    rows = np.asarray(tokens)[starts[:, None] + np.arange(length)]
    rows = rows.astype(np.int64) if rows.dtype.kind in "iu" else rows
    return rows.copy(), rows.copy()


train.windows_at = windows_at
if __name__ == "__main__":
    train.main()
