"""Is it right? Before a run: GO or NO-GO. Of the machine: are its bits exact? Of a result: is it
better than another, or is it luck?

    python check.py config/shakespeare.py                           # before a long run: GO or NO-GO
    python check.py config/shakespeare.py --only=lr,exact,seeds
    python check.py --only=portable                                 # the bits of records/portable?
    python check.py config/shakespeare.py --n_layer=2 --against="config/shakespeare.py"
    git bisect run python check.py config/shakespeare.py --against=out/golden --equal=true

Takes train.py's flags, bench.py's and those below; writes what it finds to check.json in out_dir.
docs/trouble.md explains the checks. Exit code 0: GO, or any verdict; 1: NO-GO, other bits, or a run
failed; 2: bad input. --equal=true: 0 equal, 1 differ, 125 cannot tell.
"""

import os
import shlex
import sys
import time
import traceback
from pathlib import Path
from statistics import mean, stdev

if "--equal=true" in sys.argv:  # a commit that cannot even be imported: `git bisect run` skips it
    sys.excepthook = lambda *error: (sys.__excepthook__(*error), os._exit(125))

import bench
import train
from bench import print_table, say
from lab.logged import Logged, differences, in_words
from plumbing import checkpoint, machine
from plumbing.cli import fail, run_script
from plumbing.console import REPO
from plumbing.ranks import checksum
from reporting.sanity import CHECKS, NotAsked
from reporting.verdicts import verdict_on

# The checks
only = "sanity"  # parts to run: sanity, lr, exact, portable, seeds, against; --against=... runs
#  that alone
lr_steps = 100  # most steps of the learning-rate range test, [10, inf)
exact_runs = 4  # processes that take the same steps, with deterministic mode and without, [2, inf)
exact_steps = 20  # that each of them takes, [1, inf)
against = ""  # another configuration, "CONFIG [flags]"; with --equal=true also the folder of a run
equal = False  # with --against: ask for the same bits, with one seed, as `git bisect run` wants it
seeds = 0  # runs of each configuration; 0 = with --against until a verdict holds, else 5, [0, inf)
max_seeds = 20  # with --against and --seeds=0: the most, [2, inf)
comparisons = 1  # that are made in all, this one among them: each must show more, [1, inf)


def sanity(job):
    """Checks before a long run. A fault (✗) makes a run worthless: NO-GO. A good run may have a
    warning (!), too."""
    checks = {}
    say("\nsanity:")
    for check in CHECKS:
        for name, fine, found, *passable in asked(check, job):
            mark = "✗"
            if fine is None:
                mark, found = "–", f"n/a, {found}"
            elif fine or any(passable):
                mark = "✓" if fine else "!"
            say(f"  {mark} {name}: {found}")
            checks[name] = {"mark": mark, "found": found}
    faults = [name for name in checks if checks[name]["mark"] == "✗"]
    warnings = [name for name in checks if checks[name]["mark"] == "!"]
    say(f"  NO-GO: {', '.join(faults)}" if faults else "  GO")
    if faults or warnings:
        say(f"  docs/trouble.md says what to do about: {', '.join(faults + warnings)}")
    return {"checks": checks, "ok": not faults}


def asked(check, job):
    """The answers of a check; an error in it is one more, a fault: the others are still asked."""
    try:
        yield from check(job)
    except NotAsked as reason:
        yield check.__name__.replace("_", " "), None, reason
    except Exception as error:
        traceback.print_exc()
        yield check.__name__, False, f"{type(error).__name__}: {error}"


def lr(job):
    """A range test (Smith 2017, section 3.3): raise the rate each step until the smoothed loss is
    twice its minimum. Suggests a tenth of the rate there: a long run tolerates less than this."""
    rates, losses, smooth = [], [], []
    average = 0.0
    run = job.fresh_run()
    model = job.rehearsed(run)
    batches = job.load_batches(run)
    while len(rates) < lr_steps and (not smooth or smooth[-1] < 2 * min(smooth)):
        rates.append(1e-5 * 1e5 ** (len(rates) / (lr_steps - 1)))
        inputs, targets, _ = batches.next_batch()
        losses.append(train.train_step(model, run, inputs, targets, rates[-1])["loss"].item())
        train.count_batch(run, targets)
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
    few |= {"compile": train.compile, "audit_interval": -1, "resume": "auto", "report": False}
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
    name = "portable"
    flags = [
        "config/shakespeare_plain.py",
        "--deterministic=portable",
        "--max_steps=90",
        "--save_interval=10",
        f"--data_dir={job.config['data_dir']}",
    ]
    if job.run.facts["data"]["name"] != "shakespeare":
        name = "portable_formula"
        flags.append("--dataset=formula")
    folder = job.run.folder.path / name
    start = time.perf_counter()
    bench.execute(train.__file__, flags, out_dir=folder)
    seconds = time.perf_counter() - start
    found = differences(Path(REPO, "records", name), folder).first_difference
    if found:
        say(f"portable: not the bits of records/{name}: {in_words(found)}")
        return {"ok": False, "found": found}
    last = Logged(folder).saves[-1]
    sha256 = last["sha256"]
    cpu = machine.cpu_info()[0]
    how = f"SHA-256 {sha256[:8]}..., {last['step']} steps, {seconds:.0f} s, {cpu}"
    say(f"portable: the bits of records/{name} ({how})")
    return {"ok": True, "sha256": sha256, "seconds": seconds}


def same_bits(job, script, words):
    """Does each step of both give the same bits? --against may also be the folder of a run."""
    folders = [job.run.folder.path / "first", Path(against)]
    bench.execute(job.script, job.argv, out_dir=folders[0])
    if not (folders[1] / "metrics.jsonl").is_file():
        folders[1] = job.run.folder.path / "second"
        bench.execute(script, words, out_dir=folders[1])
    found = differences(*folders, kinds=("train", "eval")).first_difference
    where = [in_words(found)] if found else []
    models = [checkpoint.load(checkpoint.newest_first(folder)[0])["model"] for folder in folders]
    checksums = [{name: checksum(model[name]) for name in model} for model in models]
    where += [name for name in checksums[0] if checksums[0][name] != checksums[1].get(name)]
    say(f"\nequal: {f'no; the first difference: {where[0]}' if where else 'yes'}")
    return {"ok": not where, "where": where[:1]}


def compare(job):
    """Full runs that differ only in their seed: how much of a last loss is chance? With --against
    also of that configuration, on the same seeds, so that batches are paired: is it better?"""
    other = bench.script_among(shlex.split(against))
    if equal:
        return same_bits(job, *other)
    sides = {"": (job.script, job.argv)}
    if against:
        sides["other "] = other
    planned = seeds or (max_seeds if against else 5)
    number = str(planned) if seeds or not against else f"up to {planned}"
    say(f"\nseeds: {number} runs each; validation loss at the end, seconds of the process")
    runs = []
    verdict = None
    for seed in range(train.seed, train.seed + planned):
        if verdict and verdict.word != "not shown" and not seeds:
            break
        run = {}
        datasets = set()
        for name, side in sides.items():
            figures = bench.race(*side, seed)
            run[f"{name}loss"] = figures["loss"]
            run[f"{name}seconds"] = figures["process"]
            datasets.add(figures["dataset"])
        if len(datasets) > 1:
            fail(f"losses on {' and '.join(sorted(datasets))} cannot be compared")
        runs.append(run)
        if against and len(runs) > 1:
            differences = [run["loss"] - run["other loss"] for run in runs]
            verdict = verdict_on(differences, comparisons, every_look=not seeds)
    rows = {f"seed {train.seed + n}": run for n, run in enumerate(runs)}
    for name, function in {"mean": mean, "deviation": stdev}.items():
        rows[name] = {key: function([run[key] for run in runs]) for key in runs[0]}
    print_table(rows, **{key: ".1f" if "seconds" in key else ".4f" for key in runs[0]})
    if not against:
        return {"runs": rows}
    look = "for one look at so many seeds" if seeds else "however often one looks"
    if comparisons > 1:
        look += f", for one of {comparisons} comparisons"
    low, high = verdict.low, verdict.high
    say(f"  mean difference {mean(differences):+.4f}, 95% interval {low:+.4f} to {high:+.4f}")
    say(f"  (the interval holds {look})")
    ratio = rows["mean"]["seconds"] / rows["mean"]["other seconds"]
    say(f"  time: first / second {ratio:.2f}\nverdict: {verdict}")
    return {"runs": rows, "interval": [low, high], "time": ratio, "verdict": str(verdict)}


PARTS = {
    "sanity": sanity,
    "lr": lr,
    "exact": exact,
    "portable": portable,
    "seeds": compare,
    "against": compare,
}


def main(argv=None):
    argv = list(sys.argv[1:] if argv is None else argv)
    if any(word.startswith("--against=") for word in argv):
        argv = ["--only=against", *argv]
    if "--seeds=1" in argv:
        fail("--seeds=1: expected 0, for as many as it takes, or 2 and more")
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
