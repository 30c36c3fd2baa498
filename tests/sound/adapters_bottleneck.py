"""Adapters (Houlsby et al. 2019) after each MLP; only they and the head learn."""

from shared import model, nn, train


class MLP(model.MLP):
    def __init__(self, config):
        super().__init__(config)
        down, up = nn.Linear(config.n_embd, 8), nn.Linear(8, config.n_embd)
        self.adapter = nn.Sequential(down, nn.GELU(), up)

    def forward(self, x):
        y = super().forward(x)
        return y + self.adapter(y)


def build_model(config, vocab_size, inner=train.build_model):
    gpt = inner(config, vocab_size)
    for name, weight in gpt.named_parameters():
        weight.requires_grad_("adapter" in name or name == "head.weight")
    return gpt


model.MLP, train.build_model = MLP, build_model
