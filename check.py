"""Is it right? Before a run: GO or NO-GO. Of the machine: are its bits exact? Of a result: is it
better than another, or is it luck?

    python check.py config/shakespeare.py                           # before a long run: GO or NO-GO
    python check.py config/shakespeare.py --only=lr,exact,seeds
    python check.py --only=portable                                 # the bits of records/portable?
    python check.py config/shakespeare.py --n_layer=2 --against="config/shakespeare.py" --seeds=5
    git bisect run python check.py config/shakespeare.py --against=out/golden --equal=true

Takes train.py's flags, bench.py's and those below; writes what it finds to check.json in out_dir.
docs/trouble.md explains the checks. Exit code 0: GO, or any verdict; 1: NO-GO, other bits, or a run
failed; 2: bad input. --equal=true: 0 equal, 1 differ, 125 cannot tell.
"""

import io
import math
import os
import shlex
import sys
import time
from contextlib import redirect_stdout
from dataclasses import replace
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

if "--equal=true" in sys.argv:  # a commit that cannot even be imported: `git bisect run` skips it
    sys.excepthook = lambda *error: (sys.__excepthook__(*error), os._exit(125))

import bench
import replay
import train
from bench import print_table, say, setting
from plumbing import audit, data, machine
from plumbing.cli import RunFailed, run_script
from plumbing.console import REPO
from plumbing.files import read_json
from reporting.logged import MEASURED, Logged, first_difference
from reporting.record import read_metrics

# The checks
only = "sanity"  # parts to run: sanity, lr, exact, portable, seeds, against; --against=... runs
#  that alone
lr_steps = 100  # most steps of the learning-rate range test, [10, inf)
exact_runs = 4  # processes that take the same steps, with deterministic mode and without, [2, inf)
exact_steps = 20  # that each of them takes, [1, inf)
against = ""  # another configuration, "CONFIG [flags]"; with --equal=true also the folder of a run
equal = False  # with --against: ask for the same bits, with one seed, as `git bisect run` wants it


# ---- before a run: sanity ------------------------------------------------------------------------


def sanity(job):
    """Checks before a long run: (name, fine, found, passable) of each; fine is None if it does not
    apply. A fault (✗) makes a run worthless: NO-GO. A good run may have a warning (!), too."""
    checks = {}
    say("\nsanity:")
    parts = learning_checks, text_checks, evaluation_checks, data_checks, flops_check
    for part in (*parts, step_checks, run_checks):
        for name, fine, found, *passable in part(job):
            mark = "–" if fine is None else "✓" if fine else "!" if any(passable) else "✗"
            say(f"  {mark} {name}: {'n/a, ' * (fine is None)}{found}")
            checks[name] = {"mark": mark, "found": found}
    faults, warnings = ([name for name in checks if checks[name]["mark"] == m] for m in "✗!")
    say(f"  NO-GO: {', '.join(faults)}" if faults else "  GO")
    if faults or warnings:
        say(f"  docs/trouble.md says what to do about: {', '.join(faults + warnings)}")
    return {"checks": checks, "ok": not faults}


@lru_cache(1)
def memorize(job):
    """(run, batch, losses, names of the weights that got a gradient) of up to 200 steps on one
    small batch, which a loop that can learn memorizes."""
    few = max(1, min(train.batch_size, 4096 // train.block_size))
    losses, reached = [], set()
    with setting(dropout=0.0, label_smoothing=0.0, batch_size=few, accum_steps=1):
        run = job.fresh_run()
        batch = job.batch()
        while not losses or len(losses) < 200 and losses[-1] > losses[0] / 10:  # NaN ends it
            lr = train.peak_lr * min(1, (len(losses) + 1) / 20)
            losses.append(train.train_step(run.model, run, *batch, lr)["loss"].item())
            weights = run.model.named_parameters()
            reached |= {name for name, w in weights if w.grad is not None and w.grad.any()}
    return run, batch, losses, reached


def learning_checks(job):
    """Can this loop learn at all?"""
    run, _, losses, reached = memorize(job)
    found = f"{losses[0]:.3f} to {losses[-1]:.3f} in {len(losses)} steps"
    learned = losses[-1] < losses[0] / 10
    yield "one batch overfits", learned and len(losses) <= 100, found, learned
    uniform = math.log(job.meta["vocab_size"])
    found = f"{losses[0]:.3f}; ln {job.meta['vocab_size']} is {uniform:.3f}"
    near = abs(losses[0] - uniform) < 0.3
    yield "loss at initialization", near, found, "tokenizer" not in job.meta
    missed = [name for name, _ in run.model.named_parameters() if name not in reached]
    found = f"all but {', '.join(missed)}" if missed else "every one"
    yield "gradients reach every parameter", not missed, found


def text_checks(job):
    """Does each position predict the next token, from the past alone? Of a trained model: a new one
    may ignore past and future alike. Is each byte of the validation text counted once?"""
    what = "no look into the future", "targets are the tokens one place on", "each byte counts once"
    if "tokenizer" not in job.meta:
        yield from ((name, None, "no text") for name in what)
        return
    run, (inputs, targets), *_ = memorize(job)
    middle = inputs.size(1) // 2
    other = inputs.clone()
    other[:, middle:] = (other[:, middle:] + 1) % job.meta["vocab_size"]
    run.model.eval()
    with torch.no_grad():
        change = (run.model(inputs) - run.model(other)).abs().amax(dim=(0, 2))
    run.model.train()
    before, after = change[:middle].max().item(), change[middle:].max().item()
    found = f"other tokens from place {middle} on move logits before it by {before:.1g}"
    yield what[0], before < 1e-4 < after, f"{found}, after it by {after:.1g}"
    yield what[1], inputs[:, 1:].equal(targets[:, :-1]), f"{inputs.numel():,} compared"

    windows = [run.val_data[first, 1] for first in range(len(run.val_data))]
    counted = sum(int((torch.as_tensor(targets) != -100).sum()) for _, targets in windows)
    extent = train.block_size * -(-train.eval_tokens // train.block_size) or math.inf
    expected = min(job.meta["val_tokens"] - 1, extent)
    ids = np.concatenate([inputs[0] for inputs, _ in windows[: 1 + 2**20 // train.block_size]])
    length = len(data.tokenizer_of(job.meta).decode(ids).encode()) / len(ids)
    told = job.meta.get("val_bytes", math.nan) / job.meta["val_tokens"]
    found = f"{counted:,} targets of {expected:,}, {length:.3f} bytes each; meta.json: {told:.3f}"
    yield what[2], counted == expected and not abs(length / told - 1) > 0.05, found


class Part(list):
    """A dataset of these sequences, each a batch of one."""

    def __getitem__(self, batch):
        first, count = batch
        rows = list(self)[first : first + count]
        return [torch.cat([*map(torch.as_tensor, parts)]) for parts in zip(*rows, strict=True)]


def evaluation_checks(job):
    """Is the validation loss what it says? Of a model with all of the run's knobs that knows one
    batch: what is wrong shows where losses differ."""
    weights = memorize(job)[0].model.state_dict()
    run = replace(job.fresh_run(), ema={})
    run.model.load_state_dict(weights)
    count = min(len(run.val_data), 11)
    modes, losses = [], []
    hook = run.model.register_forward_pre_hook(lambda model, _: modes.append(model.training))
    for order, micro_batch in ((1, count), (1, count - 1), (-1, count - 1), (1, 1)):
        few = Part(run.val_data[n, 1] for n in range(count)[::order])
        state = run.state | {"eval_micro_batch": max(1, micro_batch)}
        losses.append(train.evaluate(replace(run, val_data=few, state=state))["val_loss"])
    evaluating = any(modes)
    modes.clear()
    train.train_step(run.model, run, *job.batch(), 0.0)
    hook.remove()
    found = f"in training {all(modes)}, in evaluation {evaluating}"
    yield "the model is in train mode", all(modes) and not evaluating, found
    spread = (max(losses) - min(losses)) / abs(losses[0])
    found = f"{count} sequences in other orders and micro-batches: {spread:.2%} apart"
    yield "evaluation is the same", spread < 0.005, found

    run.model.load_state_dict(weights)
    run.model.eval()
    inputs, targets = data.to_device(run.val_data[0, count], job.device)
    with torch.no_grad(), train.autocast(job.device):
        logits, trained = run.model(inputs).double(), run.model(inputs, targets)
    real = logits[..., : job.meta["vocab_size"]]  # without columns that only pad
    total = (real.logsumexp(-1) - logits.logsumexp(-1)).exp().mean().item()
    own = torch.nn.functional.cross_entropy(real.flatten(0, -2), targets.flatten()).item()
    told = losses[0], (trained[0] if isinstance(trained, tuple) else trained).item()
    right = all(math.isclose(own, each, rel_tol=0.01) for each in told)
    found = f"to {total:.4f}; -log p is {own:.4f}, evaluation {told[0]:.4f}, model {told[1]:.4f}"
    yield "probabilities sum to 1", right and 0.99 < total < 1.0001, found


def data_checks(job):
    """Does each sequence come once, and none of them from the validation split?"""
    train_data, val_data = job.run.train_data, job.run.val_data
    batch, size = job.batch(), train.rows_at(0)
    finite = all(part.isfinite().all() for part in batch)
    yield "inputs are finite", finite, f"{batch[0].numel():,} numbers"
    first, following, later = (hashes(train_data[at, size][0]) for at in (0, size, len(train_data)))
    found = f"next is the same: {first == following}; next epoch's: {first == later}"
    yield "batches differ", first not in (following, later), found, first != following
    width = batch[0][0].numel()
    count = max(1, min(len(train_data), 2**24 // width))
    parts = (train_data[at, min(1000, count - at)][0] for at in range(0, count, 1000))
    seen = {each for part in parts for each in hashes(part)}
    twice = 1 - len(seen) / count
    found = f"{twice:.2%} of {count:,} sequences"
    yield "no sequence twice in an epoch", twice == 0, found, twice < 0.01
    held_out = max(1, min(len(val_data), 2**20 // width))
    windows = np.asarray(val_data[0, held_out][0])
    if "tokenizer" in job.meta:  # wherever in the text they begin
        windows = np.lib.stride_tricks.sliding_window_view(windows.ravel(), width)
    shared = len(seen & {*hashes(windows)}) * len(train_data) / count / held_out
    found = f"as much text as {shared:.2%} of the validation windows"
    yield "train and validation share no window", shared == 0, found, shared < 0.1


def hashes(sequences):
    return [hash(sequence.tobytes()) for sequence in np.asarray(sequences)]


def flops_check(job):
    """Is MFU true? The model's own figure against torch's count of one step."""
    with setting(grad_checkpoint=False):  # what is computed twice does not count, by convention
        run = job.fresh_run()
    batch = [part[: train.batch_size] for part in job.batch()]
    with FlopCounterMode(display=False) as counter:
        train.forward_backward(run.model, run, *batch, batch[1].numel())
    told, counted = train.flops_per_token(run.model), counter.get_total_flops() / batch[1].numel()
    found = f"flops_per_token() says {told:,.0f}, torch counts {counted:,.0f}"
    fine = None if math.isnan(told) else abs(told / counted - 1) < 0.1
    yield "FLOPs of a token", fine, found, True


def step_checks(job):
    """Does the optimizer get the clipped mean gradient of a batch that is cut into micro-batches?"""
    run, (inputs, _), *_ = memorize(job)
    run.model.eval()  # BatchNorm's statistics in training are those of a micro-batch
    few = max(3, len(inputs))  # half of them it knows; micro-batches are of unequal size
    batch = data.to_device(job.run.train_data[len(inputs) // 2, few], job.device)
    run.state["micro_batch"] = few
    run.model.zero_grad()
    whole = train.forward_backward(run.model, run, *batch, train.count_targets(batch[1]))["loss"]
    weights = [weight for weight in run.model.parameters() if weight.grad is not None]
    own = [weight.grad / run.scaler.get_scale() for weight in weights]
    norm = torch.nn.utils.get_total_norm(own).item()
    seen = [[0 * gradient for gradient in own]]
    for optimizer in run.optimizers:
        optimizer.register_step_pre_hook(lambda *_: seen.append([w.grad.clone() for w in weights]))
    if run.scaler.is_enabled():  # it has to come down from a scale that overflows
        run.scaler = torch.amp.GradScaler(job.device.type, init_scale=2.0**40)
    run.state["micro_batch"] = 2 * few // 3
    with setting(grad_clip=norm / 2):
        for _ in range(40 if train.dtype == "float16" else 2):
            numbers = train.train_step(run.model, run, *batch, 0.0)
    run.model.train()
    wrong = [got - right / 2 for got, right in zip(seen[-1], own, strict=True)]
    error = torch.nn.utils.get_total_norm(wrong).item() / (norm / 2)
    loss, scale = numbers["loss"].item(), numbers.get("loss_scale")
    fine = error < 0.05 and math.isclose(loss, whole, rel_tol=0.01)
    found = f"gradient {error:.2%} off, loss {loss:.4f} for {whole:.4f}"
    if train.dtype == "float16":
        fine, found = fine and scale is not None, f"{found}, scaled by {float(scale or 1):g}"
    yield "a step is that of its batch", fine, found


def run_checks(job):
    """Does a run that is stopped and resumed come to the same bits? Has each step its own rate?"""
    few = {"max_steps": 4, "warmup_steps": 2, "decay_steps": 4, "save_interval": 2, "keep_last": 2}
    few |= {"dropout": train.dropout or 0.1, "eval_interval": 0, "eval_tokens": train.block_size}
    few |= {"batch_size": max(1, min(train.batch_size, 4096 // train.block_size)), "accum_steps": 1}
    few |= {"resume": "auto", "report": False, "wandb_log": False, "compile": "false"}
    folder = job.run.folder.path / "few steps"
    with setting(**few), redirect_stdout(io.StringIO()) as said:
        try:
            train.main([f"--out_dir={folder}"])
            same = replay.main([str(folder), "--verify=2"]) == 0
        except RunFailed as error:
            same = bool(print(error))
        rows = [row for rows in Logged(folder).rows.values() for row in rows if "lr" in row]
        wrong = [row["step"] for row in rows if row["lr"] != train.lr_at(row["step"] - 1)]
    yield "a resume is bit for bit", same, said.getvalue().strip().splitlines()[-1]
    yield "the rate follows the schedule", not wrong, f"wrong in {len(wrong)} of {len(rows)} steps"


def lr(job):
    """A range test (Smith 2017, section 3.3): raise the rate each step until the smoothed loss is
    twice its minimum. Suggests a tenth of the rate there: a long run tolerates less than this."""
    rates, losses, smooth = [], [], []
    average = 0.0
    step = job.step(job.fresh_run())
    while len(rates) < lr_steps and (not smooth or smooth[-1] < 2 * min(smooth)):
        rates.append(1e-5 * 1e5 ** (len(rates) / (lr_steps - 1)))
        with setting(lr_at=lambda step: rates[-1]):
            losses.append(step()["loss"].item())
        average = 0.8 * average + 0.2 * losses[-1]
        smooth.append(average / (1 - 0.8 ** len(losses)))
    best = smooth.index(min(smooth))
    suggested = float(f"{rates[best] / 10:.1g}")
    say(f"\nlr: {len(rates)} steps, each at a higher rate; every fifth")
    table = {f"{rates[n]:.1e}": {"smoothed_loss": smooth[n]} for n in range(0, len(rates), 5)}
    print_table(table, smoothed_loss=".3f")
    say(f"  lowest loss {smooth[best]:.3f} at {rates[best]:.2g}: suggested --peak_lr={suggested:g}")
    return {"lr": rates, "loss": losses, "smooth": smooth, "suggested_peak_lr": suggested}


# ---- whole runs ----------------------------------------------------------------------------------


def exact(job):
    """Do fresh processes take the same steps to the same bits of weights, moments and state?"""
    few = {"max_steps": exact_steps, "warmup_steps": 0, "eval_tokens": train.block_size}
    few |= {"compile": train.compile, "audit_interval": 0, "resume": "auto", "report": False}
    rows = {}
    for name, strict in {"deterministic": True, "not deterministic": False}.items():
        results = []
        for n in range(exact_runs):
            folder = job.run.folder.path / f"{name} {n}"
            bench.execute(job.script, job.argv, **few, out_dir=folder, deterministic=strict)
            results.append(Logged(folder).row(exact_steps, "saved")["sha256"][:16])
        rows[name] = {"distinct": len({*results}), "hash": results[0]}
    say(f"\nexact: {exact_runs} processes, {exact_steps} steps each; the hash is of the first")
    print_table(rows, distinct=",.0f", hash="")
    return {"rows": rows, "ok": rows["deterministic"]["distinct"] == 1}


def portable(job):
    """Does this machine compute the bits of records/portable? Trains it again. Without the text of
    TinyShakespeare that of records/portable_formula, on a text that a formula makes."""
    has_text = job.run.facts["data"]["name"] == "shakespeare"
    record = Path(REPO, "records", "portable" if has_text else "portable_formula")
    folder = job.run.folder.path / record.name
    flags = ["config/shakespeare_plain.py", "--deterministic=portable", "--save_interval=10"]
    flags += [f"--data_dir={job.config['data_dir']}"]
    flags += [] if has_text else ["--dataset=formula"]
    start = time.perf_counter()
    bench.execute(train.__file__, flags, out_dir=folder)
    seconds = time.perf_counter() - start
    found = what_differs(record, folder)
    if found:
        say(f"portable: not the bits of records/{record.name}: {found}")
        return {"ok": False, "found": found}
    *_, last = (row for row in computed_rows(folder) if "sha256" in row)
    run = f"SHA-256 {last['sha256'][:8]}..., {last['step']} steps, {seconds:.0f} s"
    say(f"portable: the bits of records/{record.name} ({run}, {machine.cpu_info()[0]})")
    return {"ok": True, "sha256": last["sha256"], "seconds": seconds}


def what_differs(record, folder):
    """In words, the first thing in `record`, a run, that is not so in `folder`, the same run computed
    here: a knob, the data, or a number of a row; "" if there is none."""
    then, now = (read_json(path / "run.json") for path in (record, folder))
    for name, value in now["config"].items():
        known = then["config"].get(name, value)
        if value != known and not name.endswith("_dir"):
            return f"--{name}={known} there, {value} here"
    for name in ("data", "kernel_bits", "torch"):
        if then["run"].get(name) != now["run"][name]:
            return f"{name} is {then['run'].get(name)} there, {now['run'][name]} here"
    rows = zip_longest(computed_rows(record), computed_rows(folder), fillvalue={})
    for one, other in rows:
        for name in one | other:
            pair = one.get(name), other.get(name)
            if repr(pair[0]) != repr(pair[1]):
                step = (one or other).get("step")
                return f"step {step}: {name} is {pair[0]} there, {pair[1]} here"
    return ""


def computed_rows(folder):
    """The rows of a run, with what computing gives back: not times and memory, nor its end."""
    rows = []
    for row in read_metrics(folder / "metrics.jsonl")[0]:
        if row.get("event", "saved") in ("saved", "sample"):
            rows.append({name: row[name] for name in row if name not in MEASURED})
    return rows


def same_bits(job, script, words):
    """Does each step of both give the same bits? --against may also be the folder of a run."""
    folders = [job.run.folder.path / "first", Path(against)]
    bench.execute(job.script, job.argv, out_dir=folders[0])
    if not (folders[1] / "metrics.jsonl").is_file():
        folders[1] = job.run.folder.path / "second"
        bench.execute(script, words, out_dir=folders[1])
    runs = [Logged(folder) for folder in folders]
    bits = ("loss", "grad_norm", "skipped", "val_loss", "val_accuracy")
    for run in runs:  # rows of another commit may have other fields
        for rows in run.rows.values():
            rows[:] = [{name: row.get(name) for name in bits} for row in rows]
    found = first_difference(*runs, -1, math.inf, kinds=("train", "eval"))
    where = [f"step {found[0]}"] if found else []
    where += audit.bits_that_differ(*(run.checkpoints[-1][2]["model"] for run in runs))
    say(f"\nequal: {f'no; the first difference: {where[0]}' if where else 'yes'}")
    return {"ok": not where, "where": where[:1]}


def seeds_part(job):
    """Full runs that differ only in their seed: how much of a last loss is chance? With --against
    also of that configuration, on the same seeds, so that batches are paired: is it better?"""
    other = bench.script_among(shlex.split(against))
    if equal:
        return same_bits(job, *other)
    sides = {"": (job.script, job.argv)} | ({"other ": other} if against else {})
    seeds = bench.seeds
    say(f"\nseeds: {seeds} runs each; validation loss at the end, seconds of the process")
    rows = {}
    for seed in range(train.seed, train.seed + seeds):
        row = rows[f"seed {seed}"] = {}
        for name, side in sides.items():
            figures = bench.race(*side, seed)
            row |= {f"{name}loss": figures["loss"], f"{name}seconds": figures["process"]}
    runs = [*rows.values()]
    for name, function in {"mean": mean, "deviation": stdev}.items():
        rows[name] = {key: function([run[key] for run in runs]) for key in runs[0]}
    print_table(rows, **{key: ".1f" if "seconds" in key else ".4f" for key in runs[0]})
    if not against:
        return {"runs": rows}
    verdict, low, high = verdict_on([run["loss"] - run["other loss"] for run in runs])
    say(f"  mean difference {(low + high) / 2:+.4f}, 95% interval {low:+.4f} to {high:+.4f}")
    ratio = rows["mean"]["seconds"] / rows["mean"]["other seconds"]
    say(f"  time: first / second {ratio:.2f}\nverdict: {verdict}")
    return {"runs": rows, "interval": [low, high], "time": ratio, "verdict": verdict}


def t_quantile(freedom):
    """Beyond which, on both sides, 5% of Student's t lies. With t = sqrt(freedom) * tan(angle), its
    density is that of the angle, cos(angle) ** (freedom - 1)."""
    angle = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(angle) ** (freedom - 1)
    mass = np.cumsum(density[1:] + density[:-1])
    return math.sqrt(freedom) * math.tan(np.interp(0.95 * mass[-1], mass, angle[1:]))


def verdict_on(differences):
    """(better | worse | identical | not shown, low, high) for losses minus those of another config.
    low, high: the 95% interval of their mean, by the paired t-test (Student 1908)."""
    n, middle, deviation = len(differences), mean(differences), stdev(differences)
    half = t_quantile(n - 1) * deviation / math.sqrt(n)
    # the quantile is about 1.96 + 2.4 / n, and so needed is about this
    needed = max(n + 1, (1.96 * deviation / middle) ** 2 + 2) if middle else math.inf
    verdict = f"not shown (about {needed:,.0f} seeds would show a difference of this size)"
    if abs(middle) > half:
        verdict = "better" if middle < 0 else "worse"
    return verdict if any(differences) else "identical", middle - half, middle + half


PARTS = {"sanity": sanity, "lr": lr, "exact": exact, "seeds": seeds_part, "against": seeds_part}
PARTS["portable"] = portable


def main(argv=None):
    argv = list(sys.argv[1:] if argv is None else argv)
    if any(word.startswith("--against=") for word in argv):
        argv = ["--only=against", *argv]
    try:
        facts = bench.measure(globals(), argv)
    except Exception as error:
        if "--equal=true" not in argv:
            raise
        print(f"check.py: {error}", file=sys.stderr)
        return 125
    return int(not all(facts[part].get("ok", True) for part in PARTS if part in facts))


if __name__ == "__main__":
    sys.exit(run_script(main))
