"""The troubles that report.py knows: how each is detected, its likely causes, and what to do.

The name of a trouble is its detector's, and its anchor in docs/trouble.md. The advice depends on
the knobs of the run: it proposes no change that the run has already made.
"""

import re
import shlex
from collections import namedtuple

import numpy as np

from plumbing.reporting import detectors

# causes: the likeliest first. tell: what tells them apart: a flag to add to this run's own command
# ("knob": the first of `knobs`), bench.py with the flags of this run, or a whole command. reading:
# how to read its outcome. knobs: changes to try, by a factor (peak_lr*0.5) or to a value
# (schedule:constant=cosine: only if it is constant). cure: what else to try.
Trouble = namedtuple("Trouble", "find title causes tell reading knobs cure", defaults=[""])
Finding = namedtuple("Finding", "name title shows causes tell reading cure")

TABLE = [
    Trouble(
        detectors.updates_fail,
        "Updates fail",
        "the learning rate is too high; the precision is too narrow; a batch holds NaN or infinity",
        "--dtype=float32",
        "as many skips in float32: it is not the precision",
        "peak_lr*0.5 warmup_steps*2 grad_clip*0.5 dtype=float32",
    ),
    Trouble(
        detectors.float16_scale_collapses,
        "The scale of float16 collapses",
        "gradients that overflow at any scale, because the learning rate is too high; an activation"
        " above 65,504, the largest number of float16",
        "--dtype=bfloat16",
        "healthy in bfloat16, which has the range of float32: it was the range",
        "dtype=bfloat16 peak_lr*0.5 grad_clip*0.5",
    ),
    Trouble(
        detectors.clipped_always,
        "The gradient is clipped all the time",
        "a clip so low that only the gradient's direction counts; a learning rate that is too high",
        "--grad_clip=0",
        "as good without clipping: the clip was only in the way",
        "grad_clip*4 peak_lr*0.5",
    ),
    Trouble(
        detectors.norm_vanishes,
        "The gradient vanishes",
        "a learning rate so high that the weights moved to where the loss is flat; a part of the"
        " model that is cut off from the loss; gradients too small for float16",
        "check.py --only=sanity",
        "gradients reach every weight at the start: it was the learning rate",
        "peak_lr*0.1 warmup_steps*2 dtype:float16=float32",
    ),
    Trouble(
        detectors.loss_stuck,
        "The loss hardly moves",
        "the learning rate is far too low; gradients do not reach the weights; the targets are"
        " unrelated to the inputs",
        "check.py --only=sanity",
        "it suggests a far higher rate: the rate; no gradient somewhere: the model; else: the data",
        "peak_lr*10",
    ),
    Trouble(
        detectors.underfitting,
        "Both losses stay high: underfitting",
        "too few steps; the learning rate is too low; the model is too small; too much dropout",
        "check.py --only=sanity",
        "one batch is memorized: the model can learn, but needs more steps or a higher rate",
        "max_steps*4 peak_lr*3 n_embd*2 n_layer*2 dropout*0.5",
    ),
    Trouble(
        detectors.loss_rises,
        "The training loss rises again",
        "the learning rate is too high, or does not fall early enough",
        "check.py --only=lr",
        "the rate above which the loss no longer falls",
        "peak_lr*0.5 warmup_steps*2 schedule:constant=cosine",
    ),
    Trouble(
        detectors.oscillation,
        "The training loss falls, then oscillates",
        "the learning rate is too high for what is left to learn; too much momentum; small batches",
        "knob",
        "smaller swings: it was the rate",
        "peak_lr*0.3 schedule:constant=cosine momentum*0.95 beta1*0.9 batch_size*2",
    ),
    Trouble(
        detectors.loss_spikes,
        "The training loss spikes",
        "a learning rate near the edge of stability; a few odd batches",
        "--seed=2",
        "as many spikes at other steps: the rate; hardly any: the batches",
        "peak_lr*0.5 grad_clip*0.5 spike_sigma:0=6",
    ),
    Trouble(
        detectors.norm_leads_spikes,
        "The gradient's norm rises ahead of the loss",
        "updates from gradients that are too large: the norm warns, and the clip lets them pass",
        "knob",
        "no spikes under a lower clip: it was those updates",
        "grad_clip*0.5 peak_lr*0.5 warmup_steps*2",
    ),
    Trouble(
        detectors.diverges_after_resume,
        "The loss diverges after a resume",
        "a knob changed on the resume, above all the learning rate; other code or torch",
        "--resume=never",
        "no jump in a run that was never stopped: it was the change",
        "peak_lr*0.5",
        "go back to the earlier settings: report.md lists what was not exact",
    ),
    Trouble(
        detectors.plateau,
        "The training loss is on a plateau",
        "the learning rate is now too low or too high; the model has learned what it can",
        "check.py --only=lr",
        "the range of rates in which the loss falls",
        "min_lr*10 n_embd*2",
        "another --peak_lr, or fewer steps",
    ),
    Trouble(
        detectors.overfitting,
        "Validation rises while training falls: overfitting",
        "the model has seen the same data too often, or is too large for so little data",
        "knob",
        "validation falls for longer: the model was memorizing",
        "dropout*2 weight_decay*2 patience:0=3 max_steps*0.5",
        "best.pt, from before the rise; more data",
    ),
    Trouble(
        detectors.out_of_memory,
        "Memory ran out",
        "a batch too large; other work on the device; an evaluation or a sample larger than a step",
        "bench.py --only=memory",
        "what fills the memory of a step, predicted and measured",
        "batch_size*0.5 accum_steps*2 grad_checkpoint:false=true",
        "several GPUs, and --shard=true",
    ),
    Trouble(
        detectors.memory_grows,
        "Memory grows all the time",
        "tensors that a fork keeps with their graph, such as total += loss without detach(); a list"
        " or cache that is never emptied",
        "bench.py --only=memory",
        "what a step needs; memory beyond that is what is kept",
        "",
        "keep numbers, not tensors: loss.detach()",
    ),
    Trouble(
        detectors.late_rank,
        "A rank is late",
        "a slow or dying machine; a branch that one rank takes and another does not",
        "knob",
        "it passes that step: the rank was slow; it stops there again: the code",
        "hang_minutes*4",
        "resume without that machine; in the code, call plumbing.ranks.agree before a branch",
    ),
    Trouble(
        detectors.throughput_falls,
        "The throughput falls",
        "other work on the machine; memory that swaps; a device that slows down when hot",
        "vmstat 1 5",
        "r above the number of cores: other work; si or so above 0: memory swaps; on a GPU,"
        " nvidia-smi -q -d PERFORMANCE says what slows it down",
        "",
        "a machine of its own; the same command resumes the run there",
    ),
    Trouble(
        detectors.waits_for_data,
        "Training waits for data",
        "batches are read or made more slowly than they are used; a slow disk",
        "knob",
        "less waiting: workers can keep up",
        "num_workers*2 prefetch_factor*2",
        "a dataset on a local disk",
    ),
    Trouble(
        detectors.gpu_idle,
        "The GPU is idle for much of the time",
        "steps too small to fill it; training waits for data; kernels that are launched one by one,"
        " where compiling helps",
        "bench.py --only=profile",
        "where each millisecond of a step goes",
        "batch_size*2 compile=true num_workers*2",
    ),
]
TROUBLES = {each.find.__name__: each for each in TABLE}
INSTEAD_OF_OFF = {"num_workers": 2, "grad_clip": 1, "dropout": 0.1, "weight_decay": 0.1}
NEEDS = {  # when a knob has an effect
    "momentum": lambda knobs: knobs.get("optimizer") in ("momentum", "muon"),
    "beta1": lambda knobs: knobs.get("optimizer") in ("adam", "adamw"),
    "prefetch_factor": lambda knobs: knobs.get("num_workers"),
}


def troubles(run):
    """The Findings of a run, in the order of TABLE."""
    with np.errstate(all="ignore"):  # unknown values are NaN, and show nothing
        found = [(name, each, each.find(run)) for name, each in TROUBLES.items()]
    return [finding(run, name, each, shows) for name, each, shows in found if shows]


def finding(run, name, trouble, shows):
    tries = changes(run.info["config"] | run.info["run"], trouble.knobs)
    words = [f"--{knob}={value}" + (f" (now {now})" if now else "") for knob, value, now in tries]
    cure = ", ".join(filter(None, [*words, trouble.cure]))
    tell = command(run, trouble.tell, tries, name)
    return Finding(name, trouble.title, shows, trouble.causes, tell, trouble.reading, cure)


def changes(knobs, wanted):
    """[(knob, value to try, value now)] of the changes in `wanted` that would change something."""
    tries = []
    for change in wanted.split():
        name, only, how, by = re.fullmatch(r"(\w+):?(\w*)([*=])(\S+)", change).groups()
        now = knobs.get(name)
        shown = f"{now:g}" if type(now) in (int, float) else str(now).lower()
        if now is None or not NEEDS.get(name, bool)(knobs):
            continue
        if how == "=" and only in ("", shown) and shown != by:
            tries.append((name, by, shown))
        elif how == "*" and now:
            value = now * float(by)
            value = max(1, round(value)) if isinstance(now, int) else value
            tries.append((name, f"{value:.4g}", shown))
        elif how == "*" and name in INSTEAD_OF_OFF and (float(by) > 1 or name == "grad_clip"):
            tries.append((name, INSTEAD_OF_OFF[name], "off"))
    return tries


def command(run, tell, tries, name):
    """The command to paste; "" if this run has none."""
    script, *flags = [str(word) for word in run.info.get("command") or ["train.py"]]
    if tell == "knob":
        tell = "".join(f"--{knob}={value}" for knob, value, _ in tries[:1])
    if tell.startswith("--"):
        flags += [tell, f"--out_dir=out/{run.name}_{name}"]
    elif tell.startswith(("bench.py", "check.py")) and script.endswith("train.py"):
        script = script.removesuffix("train.py") + tell.split()[0]
        flags = [flag for flag in flags if not flag.startswith("--out_dir=")] + tell.split()[1:]
    else:
        return "" if tell.startswith(("bench.py", "check.py")) else tell
    last = {}  # flag -> its last occurrence, which wins
    for flag in flags:
        last.pop(flag.partition("=")[0], None)
        last[flag.partition("=")[0]] = flag
    if tell != "--resume=never":
        last.pop("--resume", None)
    ranks = run.info["hardware"].get("world_size", 1) if tell.startswith("--") else 1
    launcher = (
        ["torchrun", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else ["python"]
    )
    return shlex.join([*launcher, script, *last.values()])
