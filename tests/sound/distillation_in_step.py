"""A teacher in train_step: the step is the script's own."""

from shared import F, torch, train

train.knob("alpha", 0.5, "weight of the teacher")
teachers = []


def train_step(run, inputs, targets, lr):
    if not teachers:
        with torch.random.fork_rng(devices=[]):  # else a resume would have other dropout
            torch.manual_seed(1)
            teachers.append(train.build_model(run.config, run.facts["data"]["meta"]["vocab_size"]))
    run.optimizer.zero_grad()
    for group in run.optimizer.param_groups:
        group["lr"] = lr * group["initial_lr"] / train.peak_lr
    logits = run.model(inputs).float().flatten(0, 1)
    with torch.no_grad():
        goal = teachers[0](inputs).float().softmax(-1).flatten(0, 1)
    hard = F.cross_entropy(logits, targets.flatten())
    loss = (1 - train.alpha) * hard + train.alpha * F.cross_entropy(logits, goal)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), train.grad_clip or torch.inf)
    if norm.isfinite():
        run.optimizer.step()
    skipped = ~norm.isfinite()
    train.average_weights(run, skipped)
    counted = train.count_targets(targets)
    return {"loss": loss.detach(), "grad_norm": norm, "skipped": skipped, "targets": counted}


train.train_step = train_step
