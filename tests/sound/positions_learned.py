"""Learned positions, added to the embedding, in place of rotary ones."""

from shared import model, nn


class Embedding(model.TokenEmbedding):
    def __init__(self, config):
        super().__init__(config)
        self.position = nn.Embedding(config.block_size, config.n_embd)

    def forward(self, tokens):
        return super().forward(tokens) + self.position.weight[: tokens.size(1)]


model.TokenEmbedding = Embedding
model.rotate = lambda x, cos, sin: x
