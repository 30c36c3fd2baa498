"""One block, taken three times (Dehghani et al. 2018, "Universal Transformers"); noise on the
embedding (NEFTune)."""

from shared import model, torch


class GPT(model.GPT):
    def __init__(self, config):
        super().__init__(config)
        self.blocks.extend([self.blocks[0]] * 2)
        self.embedding.register_forward_hook(self.add_noise)

    def add_noise(self, embedding, args, x):
        return x + 0.05 * torch.rand_like(x) if self.training else x


model.GPT = GPT
