"""A frozen teacher of the same shape inside the model, in training."""

from shared import F, Taught, model, torch


class GPT(Taught):
    def __init__(self, config, teacher=model.GPT):
        super().__init__(config)
        self.teacher = teacher(config).requires_grad_(False)

    def train_loss(self, logits, inputs, targets):
        hard = model.cross_entropy(logits, targets)
        with torch.no_grad():
            goal = self.teacher(inputs).float().softmax(-1).flatten(0, 1)
        soft = F.cross_entropy(logits.float().flatten(0, 1), goal)
        return 0.3 * hard + 0.7 * soft, {"hard": hard.detach()}


model.GPT = GPT
