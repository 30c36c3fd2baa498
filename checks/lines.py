"""The lines that `check.py CONFIG` prints: {name: (what holds, what to do if it does not)}. A name is
also what --accept takes."""

LINES = {
    "overfits": (
        "one small batch is memorized",
        "the update does not lower the loss of its own batch: read `gradients` and `steps`, then try "
        "a lower and a higher --peak_lr",
    ),
    "start": (
        "the first loss is that of a uniform guess",
        "the head's initial weights are too large, or the loss is scaled",
    ),
    "given": (
        "the given weights are better than a uniform guess",
        "--init_from names weights of another text, or they were not loaded",
    ),
    "causal": (
        "no logit depends on a later token",
        "look at the attention mask, and at statistics over positions or sequences",
    ),
    "sampling": (
        "generate() draws from the model's own logits",
        "look at the cache of keys and values, at temperature and at top_k",
    ),
    "positions": (
        "the model tells positions apart",
        "queries or keys have no positions, or the same ones twice",
    ),
    "loss": (
        "the loss is the mean of -log p over the targets that count",
        "a target is left out, or a masked one counted; return a term of your own beside the loss, "
        "as (loss, {name: value})",
    ),
    "gradients": (
        "gradients are those of the loss",
        "look for a detach(), a change in place or a backward() of your own in this layer",
    ),
    "dropout": (
        "dropout differs between rows and passes, and keeps the mean",
        "draw a mask of the shape of the activations each time, and divide by 1 - dropout",
    ),
    "batches": ("two batches differ", "dataset[first, count] ignores `first`"),
    "seeds": ("two seeds start with different weights", "build_model() seeds by itself"),
    "text": ("the first training sequence", ""),
    "targets": ("targets are the next tokens", "look at __getitem__ of the training data"),
    "windows": (
        "batches are windows in a shuffled order, each once an epoch",
        "compare train.ShuffledWindows with training_starts() in plain.py",
    ),
    "leak": (
        "validation text is not in the training text",
        "split the text before it is shuffled or copied; prepare_data.py does",
    ),
    "coverage": (
        "evaluation sees each token once",
        "look at __getitem__ of the validation data: its masks and its last window",
    ),
    "flops": (
        "flops_per_token() is what torch counts",
        "mfu and the plan would be wrong: correct flops_per_token() of the model",
    ),
    "groups": (
        "each weight has the optimizer, decay and rate that the knobs say",
        "compare configure_optimizers() with that of plain.py",
    ),
    "schedule": (
        "lr_at() is the schedule that is named",
        "lr_at(step) counts updates, from 0, not micro-batches or epochs",
    ),
    "knobs": (
        "each knob that is set changes a number of the run",
        "the code reads another name, or a constant",
    ),
    "decisions": (
        "best_metric, patience, min_delta and plateau_factor do what they say",
        "look at count_evaluation()",
    ),
    "steps": (
        "each step is that of plain.py",
        "a change on purpose belongs into plain.py too (docs/forks.md)",
    ),
    "rates": (
        "tokens_per_sec and step_ms agree",
        "look at finish_rows(): a step's tokens are those of the whole batch",
    ),
    "events": ("events carry the step in which they happened", "look at where they are recorded"),
    "evaluations": (
        "each evaluation is that of plain.py",
        "look at evaluate(): its mode, its weights, its mean; a change on purpose belongs into "
        "plain.py too",
    ),
    "weights": (
        "the last weights and averages are those of plain.py",
        "this weight is updated, averaged or saved in another way",
    ),
    "best": ("best.pt has the best evaluation", "look at count_evaluation() and names_to_save()"),
    "resume": (
        "a resumed run computes its rows again to the bit",
        "state is missing from the checkpoint: keep it in a buffer, in the optimizer or in "
        "FRESH_STATE",
    ),
}
