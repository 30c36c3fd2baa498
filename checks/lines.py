"""The lines that `check.py CONFIG` prints. Each block: the name, which --accept takes; what must hold;
what was found; what to do if it does not hold."""

import train

FINE, FAULT, WARNING, ABSENT, CRASH = "✓✗!–?"
NEVER = "✗✗"  # a fault that no --accept allows

WORDS = """
overfits: training on one small batch lowers its loss to a tenth
  loss {:.4f}, after {} steps {:.4f}
  If it falls partway, raise --peak_lr or the model's size. If it hardly falls, look at `gradients`
  and `steps`, and try a lower --peak_lr. The loss of a GAN or of reinforcement learning need not fall.

warnings: torch warns of nothing while `overfits` trains
  {}
  Read the warning. Shapes (n, 1) and (n,), for example, broadcast to (n, n), and the loss is then
  not the one that you meant.

given: the model starts with the weights in the file of --init_from
  different from the file: {}
  The file was not loaded, or only in part (strict=False, renamed keys).

start: an untrained model has the loss of a uniform guess, ln(vocab_size); a loaded one at most that
  the loss is ln(vocab_size) {:+.4f}; limit 0.3
  The weights of the output layer start too large, the loss is scaled or summed over targets,
  vocab_size is wrong, or the file holds weights for another text or tokenizer.

causal: a prediction depends on no later token, and on no other sequence of the batch
  changing those tokens changes the logits by {:.2g}; limit 0.0001
  Look at the attention mask, and at norms, pooling or routing across positions or across the batch.
  A bidirectional model fails by design.

sampling: generate() draws from the model's logits, with temperature and top_k
  {:.1%} of its tokens are those of a plain loop with the same random numbers; 98% needed
  Look at the KV cache, temperature and top_k. If a layer other than attention mixes tokens, drop
  `cache` from the arguments of forward(): then generate() uses none.

positions: a small version of this model learns to copy the token four positions back
  the loss at the worst of {} positions is {:.3f}; limit 1.6
  Queries or keys lack position encodings, or the encodings repeat. A model without them, with ALiBi
  alone, or one that learns more slowly (an LSTM) fails by design.

loss: in evaluation, the loss is the mean of -log p over all targets other than -100
  relative error of the loss {:.2g}, of the accuracy {:.2g}; limit 0.0001
  A target is skipped, a masked one counts, label smoothing or dropout is active in evaluation, or
  the accuracy is wrong. A loss term of your own belongs in training only; to log it in
  evaluation, let forward() return (loss, {name: value}).

gradients: each gradient agrees with finite differences of the loss
  worst error {:.2g}, in {}; limit 0.2
  In this layer or after it, look for detach(), an in-place operation, rounding or a backward() of
  your own. A deliberate stop-gradient fails by design.

trained: each weight gets a gradient and is in the optimizer, unless it is frozen (requires_grad)
  exceptions: {}
  Is this layer used? Does configure_optimizer() include all weights?

modes: with dropout 0, train and eval mode give the same output
  they differ by {:.2g} of the largest logit; limit 0.001
  Look for `self.training`. Batch norm, and layers that are skipped at random, fail by design.

masked: the input after the last target other than -100 does not change the loss
  it changes the loss by {:.2g}; limit 0.0001
  The model attends to padding because a mask is missing, or a mean includes padding.

pieces: a batch gives the same numbers in one pass and row by row, in training and in evaluation
  different: {}
  The loss must be a sum over targets divided by train.count_targets(targets); for another
  denominator (class weights, ignore_index) replace that function. A metric that is not a mean over
  targets (F1) needs an evaluate() of your own. A loss that compares rows (contrastive) fails by
  design.

dropout: dropout is active in training only; its masks all differ and keep the mean
  changes an evaluation: {}; pairs of equal masks: {}; error of the mean: {:.2g}
  Use self.training; draw a new mask of the activations' shape each time; divide by 1 - dropout.

batches: batches differ, and each is the same whenever the data is opened and read
  the first two differ: {}; the same when opened and read again: {}
  dataset[first, count] must depend on its arguments and the seed alone. Seed each split and
  shuffle, or a resumed run may train on what was held out.

fingerprint: the fingerprint of the data is a hash of it
  it is {}
  It must change with the data, or a corrected file goes unnoticed: use fingerprint(*paths)
  of dataset.py.

seeds: two seeds start with different weights
  the same weights with --seed and the next one: {}
  build_model() sets a seed of its own, or the initial weights are constant or loaded from a file.

targets: each target is the next token
  in all of eight sequences: {}
  Look at __getitem__ of the training data. A masked language model fails by design.

coverage: an evaluation has each validation target once; with --eval_tokens, the first ones
  the expected windows of the whole split: {}; with --eval_tokens: {}
  Look at OrderedWindows: at its __getitem__, its __len__, its last window, and at eval_tokens.

leak: what is held out is not trained on
  {} of {} passages or rows of the validation data are in the training data
  Are both read from one file? Split before duplicating, or cutting into rows.

knobs: each flag or setting of model and data that is not at its default changes some result
  without effect: {}
  The code reads another name, or a constant. A flag that does not apply to this model is to be left
  out of the command. It is tried in the first step, in the last, and in those that the values of a
  script's knobs name: accept one that acts in others alone. One that changes only where and how a
  run is computed belongs into train.FREE.

windows: each step trains on the windows of checks/plain.py, in its order
  steps with different windows: {}
  Look at ShuffledWindows: an epoch has each window once, in an order set by seed and epoch. A batch
  size of your own schedule (sequences_at) fails by design.

steps: each step is that of the plain loop, checks/plain.py
  {}
  Find what changes this number. After the resume, suspect state that no checkpoint holds. If you
  intend the change, make it in checks/plain.py, too; or accept it, and the later checks use your
  train_step() on both sides.

evaluations: each evaluation is that of the plain loop
  {}
  Look at evaluate() and evaluating(): eval mode, averaged weights (ema), a mean over the targets. If
  you intend the change, make it in checks/plain.py, too.

weights: the last checkpoint has the weights of the plain loop, and their averages (ema)
  norms: {}
  Look at how this tensor is averaged, saved and restored.

best: best.pt has the best evaluation
  it is from step {}, the best evaluation from step {}
  Look at count_evaluation(), and at the save after it.

resume: a run that is stopped and resumed logs the numbers of one that is not
  {}
  State is missing from the checkpoint, or an operation is nondeterministic. Keep state in a buffer,
  in optimizer.state, in run.extra or in train.FRESH_STATE.
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
