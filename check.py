"""Is it right? Before a run: GO or NO-GO. Of a result: is it better than another, or is it luck?

    python check.py config/shakespeare.py                           # before a long run: GO or NO-GO
    python check.py my_fork.py --accept=causal                      # a fork, with a fault that is meant
    python check.py config/shakespeare.py --n_layer=2 --against="config/shakespeare.py"
    python check.py --only=portable                                 # the bits of records/portable?

Takes train.py's flags and those below. It compares a short run with that of a plain loop,
checks/plain.py, and asks questions about model, data and knobs: docs/trouble.md explains each line.
Exit code 0: GO, or any verdict of --against; 1: NO-GO, other bits, or a run failed; 2: bad input.
"""

import os
import shlex
import subprocess
import sys
import traceback
from collections import defaultdict
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

import plumbing
import train
from plumbing import REPO, fail, print0

# What is asked
only = "sanity"  # sanity | portable: does this machine compute the bits of records/portable?
accept = ""  # names of lines whose ✗ you intend, no spaces: causal,positions
against = ""  # another configuration, "[SCRIPT] CONFIG [flags]": which of the two is better?
seeds = 20  # with --against: the most runs of each; it ends when a verdict holds
CHOICES = {"only": ("sanity", "portable")}

# With these, one thread, float32 and no compiler, all x86-64 CPUs compute the same bits
PORTABLE = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "COMPATIBLE",
    "OMP_NUM_THREADS": "1",
}
PORTABLE_FLAGS = """config/shakespeare_plain.py --device=cpu --dtype=float32 --compile=false
 --max_steps=90 --save_interval=10""".split()


def main(argv=None):
    script, words = plumbing.script_among(argv)
    known = {*plumbing.knobs_in(globals()), "help"}
    own = [word for word in words if word.partition("=")[0].removeprefix("--") in known]
    flags = [word for word in words if word not in own]
    with plumbing.configured(globals(), argv=own):
        if only == "portable":
            return portable(flags)
        if against:
            return compare((script, flags), plumbing.script_among(shlex.split(against)))
        if script:
            start = train.main
            sys.modules["train"] = plumbing.load_script(script, train)
            train.main = start  # which a script that is imported must not call
        return sanity(flags)


# ---- go, or no go? -------------------------------------------------------------------------------


def sanity(flags):
    """Checks before a long run. A fault (✗) makes a run worthless: NO-GO, unless it is accepted. A
    good run may have a warning (!), too."""
    from checks.lines import ABSENT, CRASH, FAULT, FINE, LINES, NEVER
    from checks.probes import CHECKS, Job

    accepted = {*accept.split(",")} - {""}
    if accepted - LINES.keys():
        fail(f"--accept={accept}: expected names of lines: {', '.join(LINES)}")
    print0("✓ passed, ✗ fault, ! warning, – not asked, ? raised an error; what must hold | found")
    found = defaultdict(list)  # {mark: names}
    with TemporaryDirectory() as scratch:
        job = Job(flags, Path(scratch), accepted)
        for check, names in CHECKS.items():
            for name, mark, text in asked(check, names.split(), job):
                holds, _, advice = LINES[name]
                if name in accepted and mark in (FAULT, CRASH):
                    mark = "accepted"
                print0(f"{mark} {name}: {holds} | {text}")
                if mark not in (FINE, ABSENT, "accepted"):
                    print0("   ", advice)
                if mark in (FAULT, CRASH):
                    print0(f"    If it is so by design: --accept={name}")
                found[mark].append(name)
    faults = found[FAULT] + found[NEVER] + found[CRASH]
    last = {"NO-GO": faults, "accepted": found["accepted"], "not asked": found[ABSENT]}
    words = [f"{len(names)} {what}: {', '.join(names)}" for what, names in last.items() if names]
    print0("; ".join(words if faults else ["GO", *words]))
    return int(bool(faults))


def asked(check, names, job):
    """[(name, mark, text)]: what a check finds, and what is said of the lines that it does not reach.
    An error is a fault; in the loop itself it cannot be accepted."""
    from checks.lines import ABSENT, CRASH, FAULT, LINES, NEVER, NotAsked

    answers, text = [], "not for this model, data or step"
    try:
        with job.run() as run:
            for name, mark, *found in check(job, run):
                names.remove(name)
                if mark == FAULT and any(x != x for x in found):  # NaN
                    mark = NEVER
                found = [", ".join(x) or "none" if isinstance(x, list) else x for x in found]
                answers.append((name, mark, LINES[name][1].format(*found)))
    except NotAsked as reason:
        text = reason
    except Exception as error:
        traceback.print_exc()
        is_loop = {"warnings", "resume"} & {*names}  # the last lines of those that train
        found = f"{type(error).__name__}: {error}"
        answers.append((names.pop(0), NEVER if is_loop else CRASH, found))
        text = "not reached, because of that error"
    return answers + [(name, ABSENT, text) for name in names]


# ---- better, or luck? ----------------------------------------------------------------------------


def compare(*both):
    """Full runs of two (script, flags) on the same seeds, so that batches are paired: is the first
    better? One seed at a time, until a verdict holds."""
    from checks.verdicts import interval, verdict_on

    differences = []
    print0("seed     loss    other  difference")
    for seed in range(train.seed, train.seed + seeds):
        (loss, data), (other_loss, other_data) = (race(*each, seed) for each in both)
        if data != other_data:
            fail("the two have other data, so their losses cannot be compared")
        differences.append(loss - other_loss)
        print0(f"{seed} {loss:8.4f} {other_loss:8.4f} {differences[-1]:+11.4f}")
        verdict = verdict_on(differences)
        if len(differences) > 1 and verdict != "not shown":
            break
    words = """loss of the first minus that of --against, mean: {:+.4f}
95% interval: {:+.4f} to {:+.4f} (below 0: the first is better; valid at any stopping point)
verdict: {}"""
    print0(words.format(mean(differences), *interval(differences), verdict))
    return 0


def race(script, words, seed):
    """(last validation loss, data) of a whole run. A finished one with this code is not trained
    again: train.py sees that."""
    files = [word for word in (script, *words) if word.endswith(".py")]
    files += plumbing.code_files(REPO / "train.py").values()
    name = plumbing.hash_of([script, words, plumbing.fingerprint(*files)])
    folder = Path("out", "seeds", name, f"seed_{seed}")
    rows, facts = trained(folder, script, *words, f"--seed={seed}")
    losses = [row["val_loss"] for row in rows if row["kind"] == "eval"]
    return losses[-1], facts["data"]["fingerprint"]


def trained(folder, script, *words, **environment):
    """(rows, run.json) of a run of train.py or a script in a process of its own. Raises RunFailed
    with its last lines."""
    script = script or str(REPO / "train.py")
    command = [sys.executable, script, *words, "--report=false", f"--out_dir={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    if done.returncode:
        raise plumbing.RunFailed(f"{shlex.join(command)}\n{done.stdout[-2000:]}{done.stderr}")
    return plumbing.read_rows(folder / "metrics.jsonl"), plumbing.read_json(folder / "run.json")


# ---- the same bits? ------------------------------------------------------------------------------


def portable(flags):
    """Does this machine compute the bits of records/portable? Trains it again, and compares the loss
    of each step and the hash of each checkpoint."""
    record = plumbing.read_rows(REPO / "records/portable/metrics.jsonl")
    with TemporaryDirectory() as scratch:
        rows, facts = trained(Path(scratch, "run"), "", *PORTABLE_FLAGS, *flags, **PORTABLE)
    fields = "step", "loss", "grad_norm", "val_loss", "sha256"
    then = [[*map(row.get, fields)] for row in record]
    now = [[*map(row.get, fields)] for row in rows]
    differ = [pair for pair in zip(then, now, strict=False) if pair[0] != pair[1]]
    print0(f"{facts['run']['instruction_set']} kernels, {len(differ)} of {len(then)} rows differ")
    if differ:
        print0(fields, *differ[0])
    return int(then != now)


if __name__ == "__main__":
    plumbing.exit_process(main())
