"""R-Drop (Wu et al. 2021): two passes with other masks, which should agree; a model of that name."""
# flags: --dropout=0.1

from shared import F, Taught, model


class RDrop(Taught):
    def train_loss(self, logits, inputs, targets):
        other = model.GPT.forward(self, inputs)
        log_p, log_q = (each.float().log_softmax(-1).flatten(0, 1) for each in (logits, other))
        apart = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
        losses = model.cross_entropy(logits, targets) + model.cross_entropy(other, targets)
        return losses / 2 + 0.1 * apart


model.GPT = RDrop
