"""PaLM's z-loss, in training only (Chowdhery et al. 2022, section 5)."""

from shared import model


class GPT(model.GPT):
    def forward(self, inputs, targets=None, **options):
        logits = super().forward(inputs, **options)
        if targets is None:
            return logits
        loss = model.cross_entropy(logits, targets)
        if not self.training:
            return loss, {"accuracy": model.accuracy(logits, targets)}
        z = logits.float().logsumexp(-1).square()[targets != -100].mean()
        return loss + 1e-3 * z, {"z": z.detach()}


model.GPT = GPT
