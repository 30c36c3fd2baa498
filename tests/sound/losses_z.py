"""PaLM's z-loss, in training only (Chowdhery et al. 2022, section 5)."""

from shared import Taught, model


class GPT(Taught):
    def train_loss(self, logits, inputs, targets):
        z = logits.float().logsumexp(-1).square()[targets != -100].mean()
        return model.cross_entropy(logits, targets) + 1e-3 * z, {"z": z.detach()}


model.GPT = GPT
