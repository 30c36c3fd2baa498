"""What a run says that cannot go on: the numbers of its last rows, and two commands to type."""

from typing import Any

from plumbing.checkpoint import newest_first, step_of
from plumbing.console import REPO, script_flag, shown, to_paste

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
    saves = newest_first(run.folder.path)
    # a skipped update changes nothing, so without an older one the newest serves
    older = [path for path in saves if path.stem != "best" and step_of(path) < bad["step"]]
    words += [f"--resume={shown([*older, *saves][0])}", run.folder.fresh_out_dir()]
    peak_lr = facts["config"]["peak_lr"] / LOWER
    for name in ("peak_lr", "min_lr"):
        words.append(f"--{name}={min(facts['config'][name], peak_lr):.3g}")
    look = [shown(run.folder.path), f"--step={bad['step']}", *script_flag(facts)]
    ranks = facts["run"]["world_size"]
    return (
        f"failed: {why}, at step {recent[-1]['step']:,}. The last rows{numbers}.\n"
        f"A lower rate, from before: {to_paste(script, *words, ranks=ranks)}\n"
        f"What happened in step {bad['step']:,}: "
        f"{to_paste(REPO / 'replay.py', *look, ranks=ranks)}"
    )
