"""Is it right? Before a run: GO or NO-GO. Of the machine: are its bits exact? Of a result: is it
better than another, or is it luck?

    python check.py config/shakespeare.py                           # before a long run: GO or NO-GO
    python check.py config/shakespeare.py --only=lr,exact,seeds
    python check.py config/shakespeare.py --n_layer=2 --against="config/shakespeare.py" --seeds=5
    git bisect run python check.py config/shakespeare.py --against=out/golden --equal=true

Takes train.py's flags, bench.py's and those below; prints the results and writes them to check.json
in out_dir. docs/trouble.md explains the checks. Exit code 0: GO, or any verdict; 1: NO-GO, other
bits, or a run failed; 2: bad input; 130: Ctrl-C. --equal=true: 0 equal, 1 differ, 125 cannot tell.
"""

import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
import traceback
from collections import Counter, namedtuple
from dataclasses import replace
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from statistics import mean, median, stdev

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

if "--equal=true" in sys.argv:  # a commit that cannot even be imported: `git bisect run` skips it
    sys.excepthook = lambda *error: (traceback.print_exception(*error), os._exit(125))

from plumbing.configurator import configured
from plumbing.failures import RunFailed
from plumbing.knobs import read_knobs
from plumbing.tokenizers import decode

import bench
import report
import train
from bench import cell, setting, show
from plumbing import audit, checkpoints, devices, identity, nested
from plumbing.files import read_json
from plumbing.ranks import say

# The checks
only = "sanity"  # parts to run: sanity, lr, exact, seeds, against; --against=... runs that alone
lr_steps = 100  # most steps of the learning-rate range test (lr and sanity parts), [10, inf)
exact_seconds = 60.0  # total length of the tries in the exact part, or in the tries part, (0, inf)
seeds = 5  # full runs, with consecutive seeds from --seed, of each configuration, [2, inf)
against = ""  # another configuration, "CONFIG [flags]"; with --equal=true also the folder of a run
equal = False  # with --against: ask for the same bits, with one seed, as `git bisect run` wants it

Check = namedtuple("Check", "name fine passable found good")  # a fault if neither fine nor passable


# ---- before a run: sanity ------------------------------------------------------------------------


def sanity(job):
    """The checks before a long run, in order. "checks" is {name: {ok, warning, found, good}}.

    A fault makes a run worthless: NO-GO. A warning is outside the bounds that courses and papers
    give; a good run may be, too. What does not apply to this model or data is n/a.
    """
    checks = {}
    say("\nsanity:")
    for part in (learning_checks, data_checks, flops_check, run_checks):
        for name, fine, passable, found, good in part(job):
            mark = "–" if found.startswith("n/a") else "✓" if fine else "!" if passable else "✗"
            say(f"  {mark} {name}: {found}" + (f"; good: {good}" if mark != "–" else ""))
            checks[name] = {"ok": mark != "✗", "warning": mark == "!", "found": found, "good": good}
    faults = [name for name, check in checks.items() if not check["ok"]]
    warnings = [name for name, check in checks.items() if check["warning"]]
    result = {"checks": checks, "go": not faults}
    if job.is_text:
        result["example"] = [decode(t[0, :64].cpu(), job.meta) for t in job.batch()]
        say("    input  {!r}\n    target {!r}".format(*result["example"]))
    say(f"  NO-GO: {', '.join(faults)}" if faults else "  GO")
    if faults or warnings:
        say(f"  docs/trouble.md says what to do about: {', '.join(faults + warnings)}")
    return result


def not_for(name, why):
    return Check(name, True, True, f"n/a, {why}", "")


def learning_checks(job):
    """Can this loop learn at all? Up to 200 steps on one small batch, which it should memorize."""
    few = max(1, min(train.batch_size, 4096 // train.block_size))
    losses, norms, reached = [], [], set()
    with setting(dropout=0.0, label_smoothing=0.0, batch_size=few, accum_steps=1):
        run = job.fresh_run()
        inputs, targets = job.batch()
        for step in range(200):
            lr = train.peak_lr * min(1, (step + 1) / 20)
            numbers = train.train_step(run.model, run, inputs, targets, lr)
            losses.append(numbers["loss"].item())
            norms.append(numbers["grad_norm"].item())
            if step < 3:
                weights = [(n, w) for n, w in run.model.named_parameters() if w.grad is not None]
                reached |= {name for name, weight in weights if weight.grad.any()}
            if not losses[-1] > losses[0] / 10:
                break
    begin, end, took = losses[0], losses[-1], len(losses)
    learned = end < begin / 10
    found = f"{begin:.3f} to {end:.3f} in {took} steps on {few} sequences"
    yield Check("one batch overfits", learned and took <= 100, learned, found, "a tenth within 100")
    vocab_size = job.meta["vocab_size"]
    uniform = math.log(vocab_size)
    found = f"{begin:.3f}; ln {vocab_size} is {uniform:.3f}"
    near = abs(begin - uniform) < 0.3
    yield Check("loss at initialization", near, not job.is_text, found, "within 0.3 of it")
    missed = [name for name, _ in run.model.named_parameters() if name not in reached]
    found = f"none for {', '.join(missed)}" if missed else "every one, within 3 steps"
    yield Check("gradients reach every parameter", not missed, False, found, "every one")
    low, middle, high = min(norms[:10]), median(norms[:10]), max(norms[:10])
    usual = 0.1 <= middle <= 2
    sane = 1e-3 < low and high < 100
    found = f"{low:.3g} to {high:.3g}, median {middle:.3g}, in the first {len(norms[:10])} steps"
    yield Check("gradient norm in range", usual and sane, sane, found, "a median of 0.1 to 2")
    yield from text_checks(job, run.model, inputs, targets)
    yield from evaluation_checks(job, run.model.state_dict())


def text_checks(job, model, inputs, targets):
    """Does each position predict the next token, from the past alone?

    Other tokens from the middle on must change the logits from there on and none before. Needs a
    trained model: a new one may ignore past and future alike.
    """
    names = "no look into the future", "targets are the tokens one place on"
    if not job.is_text:
        yield from (not_for(name, "no text") for name in names)
        return
    middle = inputs.size(1) // 2
    other = inputs.clone()
    other[:, middle:] = (other[:, middle:] + 1) % job.meta["vocab_size"]
    model.eval()
    with torch.no_grad():
        change = (model(inputs) - model(other)).abs().amax(dim=(0, 2))
    model.train()
    before, after = change[:middle].max().item(), change[middle:].max().item()
    found = f"other tokens from place {middle} on move the logits before it by {before:.1g}"
    causal = before < 1e-4 < after
    yield Check(names[0], causal, False, f"{found}, after it by {after:.1g}", "under 0.0001 before")
    counted = targets[:, :-1] != -100
    shifted = torch.equal(inputs[:, 1:][counted], targets[:, :-1][counted])
    yield Check(names[1], shifted, False, f"{counted.sum():,} compared", "every one")


class Part:
    """A dataset of those sequences of `data` that `order` numbers, in that order."""

    def __init__(self, data, order):
        self.data, self.order = data, list(order)

    def __len__(self):
        return len(self.order)

    def __getitem__(self, batch):
        first, count = batch
        rows = [self.data[number, 1] for number in self.order[first : first + count]]
        join = torch.cat if isinstance(rows[0][0], torch.Tensor) else np.concatenate
        return [join(parts) for parts in zip(*rows, strict=True)]


def evaluation_checks(job, weights):
    """Is the validation loss what it says? weights: of a model that knows one batch, because what
    is wrong shows where losses differ; here in a model with all of the run's knobs."""
    run = job.fresh_run()
    run.model.load_state_dict(weights)
    run = replace(run, ema={})
    count = min(len(run.val_data), 11)
    modes = []
    hook = run.model.register_forward_pre_hook(lambda model, _: modes.append(model.training))
    losses = []
    for order, micro_batch in ((1, count), (1, count - 1), (-1, count - 1), (1, 1)):
        few = Part(run.val_data, range(count)[::order])
        state = run.state | {"eval_micro_batch": max(1, micro_batch)}
        losses.append(train.evaluate(replace(run, val_data=few, state=state))["val_loss"])
    evaluating = any(modes)
    modes.clear()
    train.train_step(run.model, run, *job.batch(), 0.0)
    hook.remove()
    found = f"in train mode: training {all(modes)}, evaluation {evaluating}"
    right = all(modes) and not evaluating
    yield Check("the model is in train mode", right, False, found, "True in training alone")
    spread = (max(losses) - min(losses)) / abs(losses[0])
    found = f"{count} sequences in other orders and micro-batches: {spread:.2%} apart"
    yield Check("evaluation is the same", spread < 0.005, False, found, "under 0.5%")
    run.model.load_state_dict(weights)
    yield loss_check(job, run, Part(run.val_data, range(count))[0, count], losses[0])
    yield bytes_check(job, run.val_data)


@torch.no_grad()
def loss_check(job, run, batch, reported):
    """Is the loss the mean of -log p, with probabilities of the vocabulary that sum to 1?"""
    name, vocab_size = "probabilities sum to 1", job.meta["vocab_size"]
    inputs, targets = (torch.as_tensor(part).to(job.device) for part in batch)
    run.model.eval()
    with train.autocast(job.device):
        logits, trained = run.model(inputs), run.model(inputs, targets)
    run.model.train()
    if logits.shape[:-1] != targets.shape or logits.size(-1) < vocab_size:
        return not_for(name, f"the model returns {tuple(logits.shape)}")
    logits = logits.double()
    total = logits.softmax(-1)[..., :vocab_size].sum(-1).mean().item()
    own = logits[..., :vocab_size].log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])
    own = -own[..., 0][targets != -100].mean().item()
    trained = (trained[0] if isinstance(trained, tuple) else trained).item()
    right = all(math.isclose(own, each, rel_tol=0.01) for each in (reported, trained))
    found = f"to {total:.4f}; -log p is {own:.4f}, evaluation {reported:.4f}, model {trained:.4f}"
    return Check(name, right and 0.99 < total < 1.0001, False, found, "1, and within 1%")


def bytes_check(job, val_data):
    """Bits per byte: is each target counted once, and is `val_bytes` the length of that text?"""
    meta, name = job.meta, "each byte counts once"
    if not job.is_text or not {"val_tokens", "val_bytes"} <= meta.keys():
        return not_for(name, "no text, or its length is not known")
    batches = [val_data[first, 1] for first in range(len(val_data))]
    counted = sum(int((torch.as_tensor(targets) != -100).sum()) for _, targets in batches)
    whole = train.block_size * -(-train.eval_tokens // train.block_size) or math.inf
    expected = min(meta["val_tokens"] - 1, whole)
    ids = np.concatenate([inputs[0] for inputs, _ in batches[: 1 + 2**20 // train.block_size]])
    length = len(decode(ids, meta).encode()) / len(ids)
    told = meta["val_bytes"] / meta["val_tokens"]
    right = counted == expected and math.isclose(length, told, rel_tol=0.05)
    found = f"{counted:,} targets, {length:.3f} bytes each"
    return Check(name, right, False, found, f"{expected:,}, and {told:.3f} as in meta.json")


def data_checks(job):
    """Does each sequence come once, and none of them from the validation split?"""
    data, val_data = job.datasets[:2]
    batch, size = job.batch(), train.rows_at(0)
    finite = all(part.isfinite().all() for part in batch)
    yield Check("inputs are finite", finite, False, f"{batch[0].numel():,} numbers", "all")
    first, *others = (hashes(numbers(data, at, size)).tolist() for at in (0, size, len(data)))
    pairs = zip(("next", "next epoch's"), others, strict=True)
    same = [name for name, each in pairs if each == first]
    found = (
        f"the first is the {' and the '.join(same)}"
        if same
        else "the next, and that of the next epoch"
    )
    yield Check("batches differ", not same, "next" not in same, found, "none like the first")
    width = batch[0][0].numel()
    count = max(1, min(len(data), 2**24 // width))
    seen = [hashes(numbers(data, at, min(1000, count - at))) for at in range(0, count, 1000)]
    seen = np.unique(np.concatenate(seen))
    twice = 1 - len(seen) / count
    found = f"{twice:.2%} of {count:,} sequences"
    yield Check("no sequence twice in an epoch", twice == 0, twice < 0.01, found, "none")
    windows = numbers(val_data, 0, max(1, min(len(val_data), 2**20 // width)))
    held_out = len(windows)
    if job.is_text:  # wherever in the text they begin
        windows = np.lib.stride_tricks.sliding_window_view(windows.ravel(), width)
    shared = np.isin(seen, hashes(windows)).sum() * len(data) / count / held_out
    found = f"as much text as {shared:.2%} of the validation windows"
    name = "train and validation share no window"
    yield Check(name, shared == 0, shared < 0.1, found, "none")


def numbers(data, first, count):
    """The inputs of `count` sequences as unsigned integers, (count, numbers in each)."""
    rows = np.ascontiguousarray(np.asarray(data[first, count][0]).reshape(count, -1))
    return rows.view(f"u{rows.itemsize}").astype(np.uint64)


def hashes(rows):
    """A number for each row: a polynomial, modulo 2 ** 64."""
    return rows @ np.cumprod(np.full(rows.shape[1], 6364136223846793005, np.uint64))


def flops_check(job):
    """Is MFU true? The model's own figure against torch's count of one step."""
    name, told = "FLOPs of a token", job.flops_per_token
    with setting(grad_checkpoint=False):  # what is computed twice does not count, by convention
        run = job.fresh_run()
    batch = [part[: train.batch_size] for part in job.batch()]
    with FlopCounterMode(display=False) as counter:
        train.forward_backward(run.model, run, *batch, batch[1].numel())
    counted = counter.get_total_flops() / batch[1].numel()
    found = f"flops_per_token() says {told:,.0f}, torch counts {counted:,.0f}"
    if math.isnan(told + counted):
        yield not_for(name, found)
    else:
        yield Check(name, abs(told / counted - 1) < 0.1, True, found, "within 10%")


def run_checks(job):
    """Is the device busy, the rate near the range test's? Does a step fit, and what will it cost?"""
    step_seconds = bench.median_seconds(job.step(job.fresh_run()), job.device)
    busy = devices.gpu_util(job.device)  # None: no GPU, or no NVML
    mfu = job.speed(step_seconds)["mfu"]
    fine = not mfu < 0.1 and (busy is None or busy > 85)
    found = f"MFU {cell(mfu, '.1%')}" + (f", GPU busy {busy}%" if busy is not None else "")
    good = "MFU above 10%, a GPU busy above 85%"
    yield Check("utilization", fine, True, found, good)
    suggested = range_test(job)["suggested_peak_lr"]
    near = suggested / 10 <= train.peak_lr <= 10 * suggested
    found = f"--peak_lr={train.peak_lr:g}, and the range test suggests {suggested:g}"
    yield Check("learning rate", near, True, found, "within a factor of 10")
    free = devices.free_memory(job.device)
    row = bench.predict(job, job.fresh_run(), free)
    if "fits" in row:
        found = f"{row['predicted'] / 1e9:.3f} GB of tensors; {free / 1e9:.1f} GB free, enough for "
        found += f"micro-batches of {row['fits']:,} sequences"
        # on a GPU this raises, and train.py halves the micro-batch; on a CPU Linux kills the process
        passable = job.device.type == "cuda" and row["fits"] >= 1
        fits = row["predicted"] < 0.9 * free
        yield Check("memory of a step", fits, passable, found, "under 90% of it")
    else:
        yield not_for("memory of a step", "the model or the system does not tell")
    run = job.fresh_run()
    few = Part(run.val_data, range(min(len(run.val_data), 4 * train.batch_size)))
    evaluate = partial(train.evaluate, replace(run, val_data=few))
    evaluation = bench.median_seconds(evaluate, job.device) * len(run.val_data) / len(few)
    max_steps = job.config["max_steps"]  # train.max_steps is 10**9 here
    times = 1 + math.ceil(max_steps / (train.eval_interval or max_steps))
    hours = (max_steps * step_seconds + times * evaluation) / 3600
    price = train.dollars_per_hour
    cost = f"${hours * price:.2f} at ${price:g} an hour" if price else "--dollars_per_hour tells"
    found = f"{hours:.3f} hours ({max_steps:,} steps of {1000 * step_seconds:.1f} ms, "
    found += f"{times} evaluations of {evaluation:.1f} s); {cost}"
    yield Check("hours and cost", True, True, found, "what you mean to spend")


@lru_cache(1)  # the sanity and lr parts share it
def range_test(job):
    """A range test (Smith 2017, section 3.3): raise the rate each step until the smoothed loss
    is twice its minimum. Suggests a tenth of the rate at that minimum, as fastai's lr_find does: a
    long run does not tolerate what a few steps do."""
    rates, losses, smooth = [], [], []
    average = 0.0
    step = job.step(job.fresh_run())
    while len(rates) < lr_steps and (not smooth or smooth[-1] < 2 * min(smooth)):
        rates.append(1e-5 * 1e5 ** (len(rates) / (lr_steps - 1)))
        with setting(lr_at=lambda step: rates[-1]):
            losses.append(step()["loss"].item())
        average = 0.8 * average + 0.2 * losses[-1]
        smooth.append(average / (1 - 0.8 ** len(losses)))
    suggested = float(f"{rates[smooth.index(min(smooth))] / 10:.1g}")
    return {"lr": rates, "loss": losses, "smooth": smooth, "suggested_peak_lr": suggested}


def lr(job):
    """Plot the loss of the range test against the learning rate."""
    found = range_test(job)
    rates, losses, smooth = found["lr"], found["loss"], found["smooth"]
    suggested = found["suggested_peak_lr"]
    figure = report.new_figure(8, 5)
    axes = figure.add_subplot(xscale="log", xlabel="learning rate", ylabel="training loss, nats")
    axes.plot(rates, losses, ".", color="#8a8a8a", label="loss of a step")
    axes.plot(rates, smooth, color=report.BLUE, lw=2, label="smoothed")
    axes.axvline(suggested, color=report.VERMILION, label=f"suggested peak_lr: {suggested:g}")
    axes.set_ylim(0.9 * min(losses), 1.1 * max(smooth))
    report.legend(axes)
    figure.savefig(f"{train.out_dir}/lr.png")
    best = smooth.index(min(smooth))
    say(f"\nlr: {len(rates)} steps, rates up to {rates[-1]:.2g}; plotted in lr.png")
    say(f"  lowest loss {smooth[best]:.3f} at {rates[best]:.2g}: suggested --peak_lr={suggested:g}")
    return found


# ---- of the machine: exact -----------------------------------------------------------------------


def exact(job):
    """Repeat forward and backward of one batch on fixed weights; compare the loss and gradients.

    Each setting runs in its own process, first alone, then beside as many others as there are CPUs
    (on a GPU, two). Settings differ in one thing at a time, so that the rows tell what is at fault.
    """
    mode = "compiled" if train.compile else "eager"
    settings = {  # name -> environment, compile, deterministic
        "eager": ({}, False, True),
        "eager, not deterministic": ({}, False, False),
        "compiled": ({}, True, True),
        "compiled, not deterministic": ({}, True, False),
        f"{mode}, 1 thread": ({"OMP_NUM_THREADS": "1"}, train.compile, True),
        f"{mode}, without AMX": ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, train.compile, True),
    }
    settings = {name: each for name, each in settings.items() if each[1] <= job.can_compile}
    words = job.argv if job.script == train.__file__ else [job.script, *job.argv]
    begin = partial(start, job, __file__, words, only="tries")
    seconds = exact_seconds / (2 * len(settings))
    rows = {}
    for n_load in (0, os.cpu_count() if job.device.type == "cpu" else 2):
        for _ in range(n_load):
            load = {"exact_seconds": 1e9, "out_dir": job.scratch / "load"}
            begin({"OMP_NUM_THREADS": "1"}, wait=False, **load)
        for name, (environment, compiled, strict) in settings.items():
            knobs = {"exact_seconds": seconds, "compile": compiled, "deterministic": strict}
            begin(environment, out_dir=job.scratch / "tries", **knobs)
            row = read_json(job.scratch / "tries" / "check.json")["tries"]
            rows[name + ", under load" * (n_load > 0)] = row | {"deterministic": strict}
    strict = [row for row in rows.values() if row["deterministic"]]
    tries, differ = (sum(row[key] for row in strict) for key in ("tries", "differ"))
    say("\nexact: forward and backward; bits: hash of the most frequent result; differ: all others")
    show(rows, tries=",.0f", distinct=",.0f", differ=",.0f", bits="", where="")
    say(f"  deterministic: {tries:,} tries, of which {differ:,} differ")
    if not differ:  # (1 - 3 / n) ** n is about 0.05
        say(f"  so fewer than one try in {max(1, tries // 3):,} differs, with 95% confidence")
    return {"rows": rows, "tries": tries, "differ": differ}


def tries(job):
    """One row of exact: the results of the same forward and backward, repeated."""
    parent = os.getppid()
    run = job.fresh_run()
    with torch.no_grad():
        for weight in run.model.parameters():  # the zeros of a new model would make gradients zero
            weight += 0.02 * torch.randn(weight.shape).to(weight.device)
    model = job.rehearsed(run)
    batch = job.batch()
    before = nested.clone(run.checkpoint())
    first = None
    results, tensors = Counter(), Counter()
    end = time.monotonic() + exact_seconds
    while not results or time.monotonic() < end and os.getppid() == parent:
        checkpoints.restore(run, before)
        run.model.zero_grad(set_to_none=True)
        loss = train.forward_backward(model, run, *batch, batch[1].numel())
        gradients = {name: w.grad for name, w in run.model.named_parameters()}
        found = {name: g for name, g in gradients.items() if g is not None} | {"loss": loss}
        bits = [each.cpu().contiguous().view(-1).view(torch.uint8) for each in found.values()]
        results[sha256(torch.cat(bits).numpy()).hexdigest()] += 1
        first = first or nested.clone(found)
        if len(results) > 1:
            tensors.update(audit.bits_that_differ(first, found).keys())
    [(bits, most)] = results.most_common(1)
    counts = {"tries": results.total(), "distinct": len(results), "differ": results.total() - most}
    say(f"\ntries: {counts}")
    return counts | {"bits": bits[:8], "where": ", ".join(tensors), "tensors": dict(tensors)}


def for_train(words):
    """The flags and config files among `words` that train.py takes."""
    own = "|".join({**read_knobs(__file__), **read_knobs(bench.__file__)})
    return [word for word in words if not re.match(f"--({own})=", word)]


def start(job, script, words, environment=None, wait=True, **knobs):
    """Run `script` in a subprocess with the flags `words`, overridden by `knobs`. It has its own
    session: Ctrl-C reaches only check.py, which then ends the subprocess."""
    flags = [*for_train(words), *(f"--{name}={value}" for name, value in knobs.items())]
    options = {"env": os.environ | (environment or {}), "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, script, *flags], start_new_session=True, **options)
    job.stack.callback(process.wait)
    job.stack.callback(process.kill)
    output = process.communicate()[0].decode()[-2000:] if wait else ""
    if wait and process.returncode:
        command = " ".join([script, *flags])
        raise RunFailed(f"{command} exited with {process.returncode}:\n{output}")


# ---- of a result: seeds, and one configuration against another -----------------------------------


def trained(job, script, words, seed):
    """(validation losses, seconds) of a whole run of `script` with the flags `words` and
    this seed. It lies under the config's out_dir, and is not trained again if it is finished and
    neither its knobs nor the code have changed."""
    defaults = {name: default for name, (default, _, _) in read_knobs(train.__file__).items()}
    words = for_train(words)
    with setting(**defaults), configured(vars(train), argv=words) as config:
        out_dir = Path(config.pop("out_dir"))
    printing = re.compile(r"report|^(bench|check|replay)\.py")
    code = [pair for pair in identity.code_hashes().items() if not printing.search(pair[0])]
    knobs = config | {"seed": 0}
    facts = [Path(script).read_text(encoding="utf-8"), code, knobs, torch.__version__]
    digest = sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]
    flags = ",".join(each[2:] for each in words if re.match("--(?!out_dir|seed=)", each))
    folder = out_dir / "seeds" / f"{re.sub('[^a-z0-9_.,=]', '_', flags)[:80] or 'plain'}-{digest}"
    folder = folder / f"seed_{seed}"
    if read_json(folder / "run.json").get("ended") != "finished":
        start(job, script, ["--report=false", *words], out_dir=folder, seed=seed)
    seconds = sum(read_json(folder / "run.json")["seconds"].values())
    losses = [row["val_loss"] for (_, kind), row in rows_of(folder).items() if kind == "eval"]
    if None in losses:
        raise RunFailed(f"{folder}: a validation loss is not finite")
    say(f"  seed {seed}: {losses[-1]:.4f} after {seconds:.1f} s")
    return losses, seconds


def rows_of(folder):
    """{(step, kind): row} of a run, without events."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {(row["step"], row["kind"]): row for row in rows if row["kind"] != "event"}


def seeds_part(job):
    """Full runs of train.py that differ only in their seed: how much of a final loss is chance?"""
    say(f"\nseeds: {seeds} runs; the last validation loss and the best, seconds of the process")
    runs = {}
    for seed in range(train.seed, train.seed + seeds):
        losses, seconds = trained(job, job.script, job.argv, seed)
        runs[f"seed {seed}"] = {"final": losses[-1], "best": min(losses), "seconds": seconds}
    summary = {
        name: {key: kind([each[key] for each in runs.values()]) for key in runs[f"seed {seed}"]}
        for name, kind in {"mean": mean, "deviation": stdev, "median": median}.items()
    }
    show(runs | summary, final=".4f", best=".4f", seconds=".1f")
    return {"runs": runs, **summary}


def against_part(job):
    """This configuration and the one of --against, on the same seeds, so that batches are paired:
    is the first better (a lower last validation loss), or is it luck?"""
    other = bench.script_among(shlex.split(against))
    if equal:
        return same_bits(job, *other)
    say(f"\nagainst: {seeds} runs each, of the flags above (first) and of {against} (second)")
    rows = {}
    for seed in range(train.seed, train.seed + seeds):
        first, second = (trained(job, *each, seed) for each in ((job.script, job.argv), other))
        row = {"first": first[0][-1], "second": second[0][-1], "time": first[1] / second[1]}
        rows[f"seed {seed}"] = row | {"difference": row["first"] - row["second"]}
    differences = [row["difference"] for row in rows.values()]
    middle, half = interval(differences)
    low, high, verdict = middle - half, middle + half, verdict_on(differences)
    ratio = mean(row["time"] for row in rows.values())
    show(rows, first=".4f", second=".4f", difference="+.4f", time=".2f")
    say(f"  mean difference {middle:+.4f}, 95% interval {low:+.4f} to {high:+.4f}")
    say(f"  time: first / second, on average {ratio:.2f}\nverdict: {verdict}")
    found = {"difference": middle, "interval": [low, high], "time": ratio}
    return {"runs": rows, **found, "verdict": verdict}


def interval(differences):
    """(mean, half the width of its 95% interval) by the paired t-test (Student 1908)."""
    n = len(differences)
    return mean(differences), t_quantile(n - 1) * stdev(differences) / math.sqrt(n)


def t_quantile(freedom):
    """Beyond which, on both sides, 5% of Student's t lies. With t = sqrt(freedom) * tan(angle), its
    density is that of the angle, cos(angle) ** (freedom - 1)."""
    angle = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(angle) ** (freedom - 1)
    mass = np.cumsum(density[1:] + density[:-1])
    return math.sqrt(freedom) * math.tan(np.interp(0.95 * mass[-1], mass, angle[1:]))


def verdict_on(differences):
    """better | worse | identical | not shown, for losses minus those of another configuration."""
    middle, half = interval(differences)
    if not any(differences):
        return "identical"
    if abs(middle) > half:
        return "better" if middle < 0 else "worse"
    deviation = stdev(differences)
    needed = max(len(differences), (1.96 * deviation / middle) ** 2 if middle else math.inf)
    if needed > 1e6:
        return "not shown (no number of seeds would show a difference of this size)"
    needed = int(needed)
    while t_quantile(needed - 1) * deviation / math.sqrt(needed) >= abs(middle):
        needed += 1
    return f"not shown (about {needed:,} seeds would show a difference of this size)"


def same_bits(job, script, words):
    """Does each step of both give the same bits? --against may also be the folder of a run."""
    folders = [job.scratch / "first", job.scratch / "second"]
    start(job, job.script, job.argv, out_dir=folders[0])
    if (Path(against) / "metrics.jsonl").is_file():
        folders[1] = Path(against)
    else:
        start(job, script, words, out_dir=folders[1])
    rows = [rows_of(folder) for folder in folders]
    models = [checkpoints.load(checkpoints.newest_first(each)[0])["model"] for each in folders]
    fields = "loss grad_norm skipped val_loss val_accuracy".split()
    for step, kind in sorted(rows[0].keys() | rows[1].keys()):
        pair = [each.get((step, kind), {}) for each in rows]
        differ = [name for name in fields if pair[0].get(name) != pair[1].get(name)]
        if differ or not all(pair):
            say(f"\nequal: no; the first step that differs: {step} ({', '.join(differ) or kind})")
            return {"equal": False, "step": step, "differ": differ}
    weights = list(audit.bits_that_differ(*models)) if rows[0] else []
    say(f"\nequal: {'no; the last weights differ: ' + weights[0] if weights else 'yes'}")
    return {"equal": not weights, "step": step, "differ": weights}


PARTS = {"sanity": sanity, "lr": lr, "exact": exact, "tries": tries}
PARTS |= {"seeds": seeds_part, "against": against_part}


def main(argv=None):
    argv = list(sys.argv[1:] if argv is None else argv)
    if any(word.startswith("--against=") for word in argv):
        argv = ["--only=against", *argv]
    for_bisect = "--equal=true" in argv
    try:
        facts = bench.measure(globals(), argv)
    except (RunFailed, SystemExit, Exception) as error:
        if not for_bisect and not isinstance(error, RunFailed):
            raise
        print(f"check.py: {error}", file=sys.stderr)
        return 125 if for_bisect else 1
    right = facts.get("sanity", {"go": True})["go"] and not facts.get("exact", {}).get("differ")
    return int(not right or not facts.get("against", {}).get("equal", True))


if __name__ == "__main__":
    sys.exit(main())
