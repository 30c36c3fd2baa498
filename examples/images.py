"""Another model and other data on the loop of train.py: a small convolutional network tells apart
waves of ten directions in noisy images. train.py's flags work here, and so does its report.

    python examples/images.py --max_steps=300

It gets 97% of 1,024 new images right (chance is 10%) after a few seconds on a CPU. This file
replaces train.py's `open_dataset` and `build_model`, changes some defaults, and calls its main().
Of the model's flags, only n_embd and dropout have an effect.
"""

import math
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import plumbing  # noqa: E402
import train  # noqa: E402
from dataset import InOrder, Shuffled, fingerprint  # noqa: E402
from model import accuracy  # noqa: E402

CLASSES = 10  # directions, 18 degrees apart
SIZE = 16  # pixels to a side
NOISE = 1.5  # standard deviation; the waves themselves have 0.7
TRAIN_IMAGES = 8192
VAL_IMAGES = 1024
Y, X = np.mgrid[:SIZE, :SIZE]


class Images(torch.utils.data.Dataset):
    """The images of these numbers: (float32 (1, SIZE, SIZE), class). No single pixel tells the class."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        generator = np.random.default_rng([train.seed, self.numbers[index]])
        label = int(generator.integers(CLASSES))
        angle = math.pi * label / CLASSES
        frequency = 2 * math.pi / generator.uniform(4, 8)
        phase = generator.uniform(0, 2 * math.pi)
        waves = np.sin(frequency * (math.cos(angle) * X + math.sin(angle) * Y) + phase)
        image = waves + NOISE * generator.standard_normal((SIZE, SIZE))
        return image[None], label


class ConvNet(nn.Sequential):
    """Two strided convolutions with BatchNorm, dropout, a linear layer."""

    def __init__(self, channels, dropout):
        super().__init__(
            nn.Conv2d(1, channels, 5, stride=2, padding=2, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(2 * channels * (SIZE // 4) ** 2, CLASSES),
        )

    def forward(self, images, targets=None):
        """The logits, (B, CLASSES); with targets (B,) the mean loss instead, in eval mode (that,
        {"accuracy": share of right answers})."""
        logits = super().forward(images).float()
        if targets is None:
            return logits
        loss = F.cross_entropy(logits, targets)
        return loss if self.training else (loss, {"accuracy": accuracy(logits, targets)})


def open_dataset(saved):
    """As train.open_dataset, but `meta` has no tokenizer. --eval_tokens counts images."""
    end = TRAIN_IMAGES + (train.eval_tokens or VAL_IMAGES)
    train_data = Shuffled(Images(range(TRAIN_IMAGES)), train.seed)
    val_images = Images(range(TRAIN_IMAGES, end))
    # the images follow from this file; of data in files: fingerprint(*paths)
    facts = {
        "name": "images",
        "fingerprint": fingerprint(__file__),
        "meta": {"vocab_size": CLASSES},
    }
    return train_data, InOrder(val_images, train.seed), facts


train.__doc__ = __doc__
train.open_dataset = open_dataset
train.build_model = lambda config, vocab_size: ConvNet(config["n_embd"], config["dropout"])
train.dataset = "images"
train.block_size = 1  # targets per image
train.n_embd = 16  # channels of the first convolution
train.dropout = 0.1
train.batch_size = 64
train.peak_lr = 3e-3
train.max_steps = 300
train.eval_interval = 100

if __name__ == "__main__":
    plumbing.exit_process(train.main())
