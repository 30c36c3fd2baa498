"""A loss at each layer in training, through the same head (deep supervision)."""
# flags: --n_layer=3

from shared import model


class GPT(model.GPT):
    def __init__(self, config):
        super().__init__(config)
        for block in self.blocks:
            block.register_forward_hook(self.keep)

    def keep(self, block, args, x):
        self.kept.append(x)

    def forward(self, inputs, targets=None, **options):
        self.kept = []
        out = super().forward(inputs, targets, **options)
        if targets is None or not self.training:
            return out
        early = [model.cross_entropy(self.head(model.norm(x)), targets) for x in self.kept[:-1]]
        return out + 0.1 * sum(early), {"early": sum(early).detach()}


model.GPT = GPT
