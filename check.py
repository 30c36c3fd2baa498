"""Is it right? Before a run: GO or NO-GO. Of the machine: are its bits exact? Of a result: is it
better than another, or is it luck?

    python check.py config/shakespeare.py                           # before a long run: GO or NO-GO
    python check.py config/shakespeare.py --only=exact,seeds
    python check.py --only=portable                                 # the bits of records/portable?
    python check.py config/shakespeare.py --n_layer=2 --against="config/shakespeare.py"
    git bisect run python check.py config/shakespeare.py --against=out/golden --equal=true
    python check.py --script=my_fork.py --accept=causal             # a fork; also as a plain word

Takes train.py's flags, bench.py's and those below; writes what it finds to check.json in out_dir.
docs/trouble.md explains the checks. Exit code 0: GO, or any verdict; 1: NO-GO, bits differ, or a
run failed; 2: bad input. --equal=true: 0 equal, 1 differ, 125 cannot tell.
"""

import os
import shlex
import sys
import traceback
from pathlib import Path
from statistics import mean, stdev

try:
    import bench
    import train
    from bench import print_table
    from checks import processes
    from checks.lines import LINES
    from checks.probes import CHECKS, OF_THE_LOOP, NotAsked
    from checks.run_log import RunLog, first_difference
    from checks.verdicts import interval, least_pairs, verdict_on
    from plumbing import forks
    from plumbing.cli import fail, run_script
    from plumbing.console import REPO, print0
except Exception:
    if "--equal=true" not in sys.argv:
        raise
    traceback.print_exc()
    sys.exit(125)  # a commit that cannot even be imported: `git bisect run` skips it

# The checks
only = "sanity"  # parts to run: sanity, exact, portable, seeds, against; --against=... runs that
#  alone
exact_runs = 4  # processes that take the same steps, [2, inf)
exact_steps = 20  # steps of each process, [1, inf)
against = ""  # another configuration, "CONFIG [flags]"; with --equal=true also the folder of a run
equal = False  # with --against: ask for the same bits, with one seed, as `git bisect run` wants it
seeds = 0  # runs of each configuration; 0 = with --against until a verdict holds, else 5, [0, inf)
max_seeds = 20  # with --against and --seeds=0: the most, [2, inf)
comparisons = 1  # comparisons you make in all; more of them widen the interval, [1, inf)

accept = ""  # line names whose ✗ you intend, no spaces: causal,positions

MARKS = {True: "✓", False: "✗", None: "–", "error": "?"}


def sanity(job):
    """Checks before a long run. A fault (✗) makes a run worthless: NO-GO, unless it is accepted. A
    good run may have a warning (!), too."""
    accepted = [name for name in accept.split(",") if name]
    for name in accepted:
        if name not in LINES:
            fail(f"--accept={name}: expected names of lines: {', '.join(LINES)}")
    checks = {}
    print0("\nsanity (✓ passed, cross: fault, ! warning, – not judged, ? raised an error):")
    for check in CHECKS:
        for name, fine, text, *passable in asked(check, job):
            mark = "!" if fine is False and any(passable) else MARKS[fine]
            mark = "accepted" if mark == "✗" and name in accepted else mark
            holds, advice = LINES.get(name, ("stopped early (its other lines are missing)", ""))
            print0(f"  {mark} {name}: {holds}: {text}")
            if mark in ("✗", "!") and advice:
                to_accept = f"; to accept it as intended: --accept={name}" * (mark == "✗")
                print0(f"      {advice}{to_accept}")
            checks[name] = {"mark": mark, "found": text}
    faults, used, errors = (
        [name for name in checks if checks[name]["mark"] == mark] for mark in ("✗", "accepted", "?")
    )
    for name in accepted:
        if name not in used:
            print0(f"  --accept={name} had no effect: no such fault was found")
    go = f"GO, {len(used)} accepted: {', '.join(used)}" if used else "GO"
    go += f"; not run because of an error: {', '.join(errors)}" if errors else ""
    print0(f"  NO-GO: {', '.join(faults)}" if faults else f"  {go}")
    print0('  docs/trouble.md, "Before a long run", says what each check tests. A wrong constant')
    print0("  in the model (attention scale, RoPE base, initialization) is not detected")
    return {"checks": checks, "ok": not faults}


def asked(check, job):
    """The answers of a check. An error in a check of the loop is a fault; elsewhere it says that the
    question does not fit this model or data. Its name is then that of the line, if it has only one."""
    try:
        yield from check(job)
    except Exception as error:
        name = check.__name__.removesuffix("_check").replace("_", " ")
        text = " ".join(str(error).split())[:200]
        if isinstance(error, NotAsked):
            yield name, None, text
            return
        is_fault = check in OF_THE_LOOP
        if is_fault:
            traceback.print_exc()
        yield name, False if is_fault else "error", f"{type(error).__name__}: {text}"


# ---- the same bits? ------------------------------------------------------------------------------


def exact(job):
    """Do fresh processes take the same steps to the same bits of weights, moments and state?"""
    few = {
        "max_steps": exact_steps,
        "warmup_steps": 0,
        "eval_tokens": train.block_size,
        "compile": train.compile,
        "report": False,
    }
    folders = [trained(job, f"exact {n}", job.script, job.argv, **few) for n in range(exact_runs)]
    return same_bits(f"exact ({exact_runs} processes, {exact_steps} steps each)", *folders)


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
    folder = trained(job, name, train.__file__, flags)
    last = RunLog(folder).saves[-1]
    title = f"portable (records/{name}, SHA-256 {last['sha256'][:8]}..., {last['step']} steps)"
    return same_bits(title, REPO / "records" / name, folder)


def equal_bits(job, script, words):
    """Does each step of both give the same bits? --against may also be the folder of a run."""
    folder = trained(job, "first", job.script, job.argv)
    other = Path(against)
    if not (other / "metrics.jsonl").is_file():
        other = trained(job, "second", script, words)
    return same_bits("compared with --against", other, folder, kinds=("train", "eval"))


def same_bits(title, first, *folders, **options):
    """Do the runs in these folders have the bits of the first one? Prints where they differ."""
    found = [first_difference(first, folder, **options) for folder in folders]
    print0(f"\n{title}: {'the bits differ' if any(found) else 'the same bits'}")
    words = "  step {step}: {field} {then!s:.20} in the reference, {now!s:.20} here"
    for difference in filter(None, found):
        print0(words.format(**difference))
    return {"ok": not any(found), "found": found}


def trained(job, name, script, words, **knobs):
    """The folder of a run, which goes with the job's."""
    folder = job.run.folder.path / name
    processes.execute(script, words, **knobs, out_dir=folder)
    return folder


# ---- better, or luck? ----------------------------------------------------------------------------


def spread(job):
    """Full runs that differ only in their seed: how much of a last loss is chance?"""
    count = seeds or 5
    print0(f"\nseeds: {count} runs; validation loss at the end, seconds of the process")
    runs = [processes.race(job.script, job.argv, train.seed + n) for n in range(count)]
    return {"runs": with_mean([figures_of(run) for run in runs])}


def compare(job):
    """Full runs of two configurations on the same seeds, so that batches are paired: is the first
    better? One seed at a time, until a verdict holds."""
    path, words = forks.script_among(shlex.split(against))
    other = path or train.__file__, words
    if not os.path.isdir(against):  # before the first run: are these flags right?
        processes.output_of([other[0], *processes.for_train(words), "--help"])
    if equal:
        return equal_bits(job, *other)
    most = seeds or max_seeds
    print0(f"\nagainst: at most {most} seeds; validation loss at the end, seconds of the process")
    if most < (least := least_pairs(comparisons)):
        print0(f"  {most} pairs of runs cannot show a difference, however large: --seeds={least}")
    runs = []
    differences = []
    for n in range(most):
        first = processes.race(job.script, job.argv, train.seed + n)
        second = processes.race(*other, train.seed + n)
        if first["dataset"] != second["dataset"]:
            fail(f"losses on {first['dataset']} and {second['dataset']} cannot be compared")
        runs.append(figures_of(first) | figures_of(second, "other "))
        differences.append(first["loss"] - second["loss"])
        verdict = verdict_on(differences, comparisons)
        if n and not seeds and verdict != "not shown":
            break
    rows = with_mean(runs)
    low, high = interval(differences, comparisons)
    print0(
        f"  loss of the first minus that of --against, mean: {mean(differences):+.4f}\n"
        f"  95% interval: {low:+.4f} to {high:+.4f} (below 0: the first is better; valid\n"
        f"  at any stopping point; corrected for --comparisons={comparisons})"
    )
    ratio = rows["mean"]["seconds"] / rows["mean"]["other seconds"]
    print0(f"  time: first / --against {ratio:.2f}\nverdict: {verdict}")
    return {"runs": rows, "interval": [low, high], "time": ratio, "verdict": verdict}


def figures_of(run, prefix=""):
    """What a table shows of what race() returned."""
    return {f"{prefix}loss": run["loss"], f"{prefix}seconds": run["process"]}


def with_mean(runs):
    """{row: run}, with rows of the means and deviations; prints them."""
    rows = {f"seed {train.seed + n}": run for n, run in enumerate(runs)}
    for name, function in {"mean": mean, "deviation": stdev}.items():
        rows[name] = {key: function([run[key] for run in runs]) for key in runs[0]}
    print_table(rows, **{key: ".1f" if "seconds" in key else ".4f" for key in runs[0]})
    return rows


PARTS = {
    "sanity": sanity,
    "exact": exact,
    "portable": portable,
    "seeds": spread,
    "against": compare,
}


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        fail("expected one process; type python in place of torchrun")
    if any(word.startswith("--against=") for word in argv):
        argv = ["--only=against", *argv]
    if "--seeds=1" in argv:
        fail("--seeds=1: expected 0, for as many as it takes, or 2 and more")
    try:
        facts = bench.measure(globals(), argv)
    except Exception as error:
        if "--equal=true" not in argv:
            raise
        print(f"check.py: cannot tell (exit 125): {error}", file=sys.stderr)
        return 125
    return int(not all(facts.get(part, {}).get("ok", True) for part in PARTS))


if __name__ == "__main__":
    sys.exit(run_script(main))
