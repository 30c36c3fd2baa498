"""F1 over the whole split, by an evaluate() of the script's own."""
# flags: --best_metric=-val_f1

from shared import F, classify, torch, train


@torch.no_grad()
def evaluate(run):
    logits, labels = [], []
    with train.evaluating(run):
        for x, y in train.val_batches(run):
            logits.append(run.model(x))
            labels.append(y)
    logits, labels = torch.cat(logits).float(), torch.cat(labels)
    chosen = logits.argmax(-1) == 1
    right = (chosen & (labels == 1)).sum()
    f1 = 2 * right / (chosen.sum() + (labels == 1).sum()).clamp(min=1)
    return {"val_loss": F.cross_entropy(logits, labels), "val_f1": f1, "val_tokens": len(labels)}


classify()
train.evaluate = evaluate
