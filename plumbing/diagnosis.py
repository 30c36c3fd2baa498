"""What a run says that cannot go on: the numbers of its last rows, and two commands to type."""

import shlex
from typing import Any

from plumbing.checkpoint import newest_first, step_of
from plumbing.console import REPO, script_flag, shown

LOWER = 3  # the rate to try is this many times lower


def diagnosis(run: Any, why: str, recent: list[dict]) -> str:
    """Why a run ends, the numbers of its `recent` rows, and two commands: one that goes on from a
    checkpoint of before the first bad row with a lower rate, and one that shows that step. Rank 0
    only. Without a skipped row the last one is the bad one."""
    bad = next((row for row in recent if row["skipped"]), recent[-1])
    numbers = ""
    for name in ("lr", "grad_norm", "loss"):
        numbers += f"; {name} " + " ".join(f"{row[name]:.3g}" for row in recent)
    facts = run.folder.facts
    script, *words = facts["command"]
    config = facts["config"]
    saves = newest_first(run.folder.path)
    # a skipped update changes nothing, so without an older one the newest serves
    older = [path for path in saves if step_of(path) is not None and step_of(path) < bad["step"]]
    begin = [*older, *saves][0]
    peak_lr = config["peak_lr"] / LOWER
    min_lr = min(config["min_lr"], peak_lr)
    rates = f"--peak_lr={peak_lr:.3g}", f"--min_lr={min_lr:.3g}"
    again = [*words, f"--resume={shown(begin)}", *rates, run.folder.fresh_out_dir()]
    look = [shown(run.folder.path), f"--step={bad['step']}", *script_flag(facts)]
    ranks = facts["run"]["world_size"]
    launcher = ["python"]
    if ranks > 1:
        launcher = ["torchrun", "--standalone", f"--nproc_per_node={ranks}"]
    return (
        f"failed: {why}, at step {recent[-1]['step']:,}. The last rows{numbers}.\n"
        f"A lower rate, from before: {shlex.join([*launcher, shown(script), *again])}\n"
        f"What happened in step {bad['step']:,}: "
        f"{shlex.join([*launcher, shown(REPO / 'replay.py'), *look])}"
    )
