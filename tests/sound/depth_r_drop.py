"""R-Drop (Wu et al. 2021): two passes with other masks, which should agree; a model of that name."""
# flags: --dropout=0.1

from shared import F, model


class RDrop(model.GPT):
    def forward(self, inputs, targets=None, **options):
        logits = super().forward(inputs, **options)
        if targets is None:
            return logits
        loss = model.cross_entropy(logits, targets)
        if not self.training:
            return loss
        other = super().forward(inputs)
        log_p, log_q = (each.float().log_softmax(-1).flatten(0, 1) for each in (logits, other))
        apart = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
        return (loss + model.cross_entropy(other, targets)) / 2 + 0.1 * apart


model.GPT = RDrop
