"""A frozen teacher of the same shape inside the model, in training."""

from shared import F, model, torch

import train  # noqa: F401


class GPT(model.GPT):
    def __init__(self, config, teacher=model.GPT):
        super().__init__(config)
        self.teacher = teacher(config).requires_grad_(False)

    def forward(self, inputs, targets=None, **options):
        logits = super().forward(inputs, **options)
        if targets is None:
            return logits
        hard = model.cross_entropy(logits, targets)
        if not self.training:
            return hard
        with torch.no_grad():
            goal = self.teacher(inputs).float().softmax(-1).flatten(0, 1)
        soft = F.cross_entropy(logits.float().flatten(0, 1), goal)
        return 0.3 * hard + 0.7 * soft, {"hard": hard.detach()}


model.GPT = GPT
