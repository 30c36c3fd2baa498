"""The lines that `check.py CONFIG` prints. Each block: the name, which --accept takes; what holds;
what was found; what to do if it does not hold."""

import train

FINE, FAULT, WARNING, ABSENT, CRASH = "✓✗!–?"
NEVER = "✗✗"  # a fault that no --accept allows

WORDS = """
overfits: steps on one small batch, again and again, lower its loss to a tenth
  loss {:.4f}, after {} steps {:.4f}
  If it falls at all, the rate may be low or the model small. Else look at `gradients` and `steps`,
  and try a lower and a higher --peak_lr. Where two losses play against each other (GAN), or the loss
  is no distance (reinforcement learning), it need not fall.

warnings: torch prints no warning in these steps
  {}
  Read it: if shapes differ, such as (n, 1) and (n,), they are combined to (n, n), and the loss is
  another one than you think.

given: the model starts with the weights of --init_from
  other weights: {}
  The file was not loaded, or only parts of it (strict=False, other names).

start: an untrained model has the loss of a uniform guess, ln(vocab_size); one from a file no more
  it is off by {:+.4f}
  The weights of the output layer start too large, the loss is scaled or summed over targets,
  vocab_size is wrong, or the file holds weights for another text or tokenizer.

causal: a prediction depends on no later token, and on no other sequence of the batch
  other tokens, later or in another sequence, move it by {:.2g}
  Look at the attention mask, and at norms, pooling or routing over positions or over the batch. A
  model that may look ahead is meant to.

sampling: generate() draws what the model's own logits say, with temperature and top_k
  {:.1%} of its tokens are those that a plain loop draws from the same random numbers
  Look at the cache of keys and values, at temperature and top_k. A layer that mixes tokens outside
  attention must not take `cache`.

positions: a small model of this kind learns to repeat the token of four places before
  the worst loss of {} positions is {:.3f}, limit 1.6
  Queries or keys lack positions, or positions repeat. A model without positions, with ALiBi alone,
  or one that cannot train at a rate of 0.01 fails, too.

loss: in evaluation, the loss is the mean of -log p over the targets that count (not -100)
  off by {:.2g}, the accuracy by {:.2g}
  A target is left out, a masked one counts, label smoothing or dropout acts in evaluation, or the
  accuracy is wrong. A term of your own belongs to the training loss alone; return it as (loss,
  {name: value}).

gradients: the loss changes along each weight as its gradient says
  off by {:.2g} of the usual change, in {}; limit 0.2
  Look for detach(), a change in place, rounding or a backward() of your own in this layer. A
  gradient that is stopped on purpose looks the same.

trained: each weight gets a gradient and is in the optimizer, unless it is frozen
  unusual: {}
  Is this layer used? Does configure_optimizer() get all weights?

modes: without dropout, a model computes the same in training and in evaluation
  off by {:.2g} of the largest number
  Look for `self.training`. Batch norm, and layers that are skipped at random, differ by nature.

masked: what comes after the last target that counts does not change the loss
  it moves by {:.2g}
  Padding is looked at: a mask is missing, or a mean is taken over padding, too.

pieces: a batch in one pass and in passes of one row has one loss, and an evaluation the same numbers
  other numbers: {}
  The loss must be a mean over train.count_targets(targets): if its mean has another denominator
  (class weights, ignore_index), replace that function. A number that is no mean over rows (F1) needs
  an evaluate() of your own. A loss that compares the rows of a batch depends on it by nature.

dropout: dropout is off in evaluation; all its masks differ and keep the mean
  off in evaluation: {}; equal pairs of masks: {}; the mean is off by {:.2g}
  Use self.training; draw a new mask of the activations' shape each time; divide by 1 - dropout.

batches: batches differ, and each one is the same whenever the data is opened and read
  the first two differ: {}; opened and read again, they are the same: {}
  dataset[first, count] must follow from `first` and the seed. Is a split or a shuffle drawn without
  a seed? A resumed run would train on what it had held out before.

fingerprint: the fingerprint of the data looks like a hash
  it is {}
  It must change with the data, or a finished run answers for a corrected file:
  dataset.fingerprint(*paths).

seeds: two seeds start with different weights
  --seed, and the next one
  build_model() sets a seed of its own, or its first weights are constant or from a file.

targets: targets are the next tokens
  of eight sequences
  Look at __getitem__ of the training data. A masked language model is meant to differ.

coverage: an evaluation sees each target of the validation text once
  of the whole split, and with --eval_tokens
  Look at __getitem__ and __len__ of the validation data, and at its last window.

leak: what is held out is not trained on
  {} of {} passages or rows of the validation data are in the training data
  Split before shuffling, copying or cutting into rows.

knobs: each flag or setting for model and data that is not at its default changes some number
  without effect: {}
  The code reads another name, or a constant. Or it has nothing to do here: then leave it out.

windows: each step trains on the windows of checks/plain.py, in its order
  steps with other windows: {}
  Look at ShuffledWindows: an epoch has each window once, in an order that seed and epoch give. A
  batch that grows by a sequences_at() of your own is meant to differ.

steps: each step is that of the plain loop, checks/plain.py
  {}
  Find what changes the number named above. If you intend it, make the same change in
  checks/plain.py; or accept it, and the rest is compared beside your own train_step().

evaluations: each evaluation is that of the plain loop
  {}
  Look at evaluate() and evaluating(): eval mode, averaged weights, a mean over the targets. If you
  intend the change, make it in checks/plain.py, too.

weights: the last checkpoint has the weights and averages of the plain loop
  {}
  Look at how this tensor is averaged, saved and restored.

best: best.pt has the best evaluation
  it is of step {}, the best evaluation of step {}
  Look at count_evaluation(), and at the save after it.

resume: a run that is stopped and resumed logs the same rows again
  {}
  State is missing from the checkpoint (keep it in a buffer, in the optimizer, in run.extra or
  train.FRESH_STATE), or an operation is not deterministic.
"""
LINES = {}
for block in WORDS.strip().split("\n\n"):
    first, found, *advice = block.split("\n")
    name, _, holds = first.partition(": ")
    LINES[name] = holds, found.strip(), " ".join(map(str.strip, advice))


class NotAsked(Exception):
    """The question does not apply to this model or data."""


def is_own(name):
    """Whether a script has put a function of its own in the place of train.NAME."""
    return getattr(train, name).__module__ not in ("train", "model", "optim", train.__name__)


def judged(fine, is_mild=False):
    return FINE if fine else WARNING if is_mild else FAULT
