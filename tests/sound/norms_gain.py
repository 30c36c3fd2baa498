"""LayerNorm with gain and bias before attention and MLP: vectors, without decay."""

from shared import model, nn


class Block(model.Block):
    def __init__(self, config):
        super().__init__(config)
        self.first, self.second = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)

    def forward(self, x, cos, sin, last_only=False, **options):
        y = self.attention(self.first(x), cos, sin, last_only, **options)
        x = (x[:, -1:] if last_only else x) + self.dropout(y)
        return x + self.dropout(self.mlp(self.second(x)))


model.Block = Block
