"""A GAN: two networks and two optimizers in one step; what is evaluated is a distance."""

from shared import F, nn, np, torch, train, use


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.make = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2))
        self.judge = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, noise, real):
        return (self.make(noise).mean(0) - real.mean(0)).square().sum()


def says(scores, is_real):
    return F.binary_cross_entropy_with_logits(scores, torch.full_like(scores, is_real))


def train_step(run, noise, real, lr):
    make, judge = run.model.make, run.model.judge
    if "judge" not in run.extra:
        run.extra["judge"] = torch.optim.Adam(judge.parameters(), 1e-3)
    run.extra["judge"].zero_grad()
    (says(judge(real), 1) + says(judge(make(noise).detach()), 0)).backward()
    run.extra["judge"].step()
    run.optimizer.zero_grad()
    run.optimizer.param_groups[0]["lr"] = lr
    loss = says(judge(make(noise)), 1)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(make.parameters(), 10.0)
    if norm.isfinite():
        run.optimizer.step()
    skipped = ~norm.isfinite()
    train.average_weights(run, skipped)
    return {"loss": loss.detach(), "grad_norm": norm, "skipped": skipped, "targets": len(real)}


rng = np.random.RandomState(0)
noise, real = rng.randn(600, 4).astype(np.float32), rng.randn(600, 2).astype(np.float32) + 2
use([*zip(noise, real, strict=True)])
train.train_step = train_step
train.build_model = lambda *_: Pair()
train.configure_optimizer = lambda model, knobs, _: torch.optim.Adam(model.make.parameters())
train.count_targets = len
