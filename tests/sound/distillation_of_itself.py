"""Mean teacher (Tarvainen & Valpola 2017): the run's own averages teach it, as a wrapped step."""

from shared import model, train


class GPT(model.GPT):
    averages = None

    def forward(self, inputs, targets=None, **options):
        out = super().forward(inputs, targets, **options)
        if targets is None or not self.training or not self.averages:
            return out
        weights = self.named_parameters()
        return out + 0.01 * sum((w - self.averages[name]).square().mean() for name, w in weights)


def train_step(run, inputs, targets, lr, inner=train.train_step):
    run.model.averages = run.ema
    return inner(run, inputs, targets, lr)


model.GPT, train.train_step = GPT, train_step
