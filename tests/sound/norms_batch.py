"""Batch norm over the channels of an image: it has buffers, and differs in evaluation."""

from shared import Net, classify, nn


class Normed(Net):
    def __init__(self, config):
        super().__init__(config, nn.BatchNorm1d(32))


classify(Normed)
