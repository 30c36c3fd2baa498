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
        "the output layer's initial weights are too large, the loss is scaled or summed, or "
        "vocab_size is wrong",
    ),
    "given": (
        "the loaded weights beat a uniform guess",
        "the file holds weights for another text or tokenizer, or they were not loaded",
    ),
    "causal": (
        "no logit depends on a later token or another sequence",
        "look at the attention mask, and at norms, pooling or routing over positions or the batch",
    ),
    "sampling": (
        "generate() draws from the model's own logits",
        "look at the KV cache, temperature and top_k; a layer that mixes tokens outside attention "
        "must not take `cache`",
    ),
    "positions": (
        "the model tells positions apart",
        "queries or keys lack positions or repeat them; ALiBi alone, or a model that cannot train "
        "at lr 1e-2, fails too",
    ),
    "loss": (
        "the loss is the mean of -log p over the targets that count",
        "a target is left out, a masked one (-100) counts, label smoothing or dropout acts in "
        "evaluation, or accuracy is wrong; return extra terms as (loss, {name: value})",
    ),
    "gradients": (
        "gradients are those of the loss",
        "look for detach(), an in-place change, rounding (straight-through) or a custom backward() "
        "in this layer",
    ),
    "dropout": (
        "dropout is off in eval mode; its masks differ by row and pass, and keep the mean",
        "use self.training; draw a mask of the activations' shape each time; divide by 1 - dropout",
    ),
    "batches": ("two batches differ", "dataset[first, count] ignores `first`, or the data repeats"),
    "seeds": (
        "two seeds start with different weights",
        "build_model() sets its own seed, or its initial weights are constant or loaded from a file",
    ),
    "text": ("the first training sequence, for you to read", ""),
    "targets": ("targets are the next tokens", "look at __getitem__ of the training data"),
    "windows": (
        "training windows are those of plain.py, in its order",
        "compare train.ShuffledWindows with training_starts() in plain.py",
    ),
    "leak": (
        "no long stretch of validation text is in the training text",
        "split before shuffling or copying, as prepare_data.py does; short recurring passages are "
        "normal",
    ),
    "coverage": (
        "evaluation sees each token once",
        "look at __getitem__ of the validation data: its masks and its last window",
    ),
    "flops": (
        "flops_per_token() is within 10% of torch's count",
        "MFU and time estimates would be wrong: correct the model's flops_per_token()",
    ),
    "groups": (
        "each kind of weight has the weight decay of plain.py",
        "compare configure_optimizers() with that of plain.py",
    ),
    "schedule": (
        "lr_at() is the schedule that is named",
        "look at warmup, decay end and min_lr in lr_at(); `step` counts updates from 0, not "
        "micro-batches or epochs",
    ),
    "knobs": (
        "each knob that is not at its default changes a number of a short run",
        "the code reads another name, or a constant; a clip or plateau threshold may just not be "
        "reached",
    ),
    "decisions": (
        "best_metric, min_delta and plateau_* decide as documented",
        "look at count_evaluation()",
    ),
    "steps": (
        "each step is that of plain.py",
        "find what changes the number named above; if you intend it, make the same change in "
        "plain.py (docs/forks.md)",
    ),
    "rates": (
        "tokens_per_sec and step_ms agree",
        "look at finish_rows(): a step's tokens are those of the whole batch",
    ),
    "events": (
        "an out_of_memory event carries its step",
        "look at the retry in plumbing/out_of_memory.py and at your train_step()",
    ),
    "evaluations": (
        "each evaluation is that of plain.py",
        "look at evaluate(): eval mode, EMA weights, mean over targets; if you intend the change, "
        "make it in plain.py too",
    ),
    "weights": (
        "the last weights and their EMA are those of plain.py",
        "if `steps` has ✗, fix that first; else look at how this tensor is averaged (EMA) or saved",
    ),
    "best": ("best.pt has the best evaluation", "look at count_evaluation() and names_to_save()"),
    "resume": (
        "a resumed run computes its rows again to the bit",
        "state is missing from the checkpoint (keep it in a buffer, the optimizer or "
        "train.FRESH_STATE), or an operation is not deterministic",
    ),
}
