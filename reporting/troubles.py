"""The troubles that report.py knows: the likely causes of each, what tells them apart, what to try.

The name of a trouble is that of its detector, and its anchor in docs/trouble.md. Advice depends on
the knobs of the run: none proposes a change that the run has already made.
"""

import re
import shlex
from collections import namedtuple

import numpy as np

from reporting import detectors

# Four lines each: the name, and the title; causes, the likeliest first; what tells them apart (a flag
# to add to this run's command, "knob" for the first of the changes below, a script with the flags of
# this run, or a whole command) and how to read its outcome; changes to try, by a factor (peak_lr*0.5)
# or to a value (schedule:constant=cosine: only if it is constant), and what else helps.
TABLE = """
updates_fail: Updates fail
    the learning rate is too high; the precision is too narrow; a batch holds NaN or infinity
    --dtype=float32: as many skips in float32: it is not the precision
    peak_lr*0.5 warmup_steps*2 grad_clip*0.5 grad_clip:0=1 dtype=float32
float16_scale_collapses: The scale of float16 collapses
    gradients overflow at any scale, as the learning rate is too high; an activation above 65,504
    --dtype=bfloat16: healthy in bfloat16, which has the range of float32: it was the range
    dtype=bfloat16 peak_lr*0.5 grad_clip*0.5 grad_clip:0=1
clipped_always: The gradient is clipped all the time
    a clip so low that only the gradient's direction counts; a learning rate that is too high
    --grad_clip=0: as good without clipping: the clip was only in the way
    grad_clip*4 peak_lr*0.5
norm_vanishes: The gradient vanishes
    a rate so high that the weights moved to where the loss is flat; a part cut off from the loss; float16
    check.py --only=sanity: gradients reach every weight at the start: it was the learning rate
    peak_lr*0.1 warmup_steps*2 dtype:float16=float32
loss_stuck: The loss hardly moves
    a learning rate far too low; weights that no gradient reaches; targets unrelated to the inputs
    check.py --only=sanity: it suggests a far higher rate: the rate; no gradient somewhere: the model; else: the data
    peak_lr*10
underfitting: Both losses stay high: underfitting
    too few steps; the learning rate is too low; the model is too small; too much dropout
    check.py --only=sanity: one batch is memorized: the model can learn, but needs more steps or a higher rate
    max_steps*4 peak_lr*3 n_embd*2 n_layer*2 dropout*0.5
loss_rises: The training loss rises again
    the learning rate is too high, or does not fall early enough
    check.py --only=lr: the rate above which the loss no longer falls
    peak_lr*0.5 warmup_steps*2 schedule:constant=cosine
oscillation: The training loss falls, then oscillates
    the learning rate is too high for what is left to learn; too much momentum; small batches
    knob: smaller swings: it was the rate
    peak_lr*0.3 schedule:constant=cosine batch_size*2
loss_spikes: The training loss spikes
    a learning rate near the edge of stability; a few odd batches
    --seed=2: as many spikes at other steps: the rate; hardly any: the batches
    peak_lr*0.5 grad_clip*0.5 grad_clip:0=1
norm_leads_spikes: The gradient's norm rises ahead of the loss
    updates from gradients that are too large: the norm warns, and the clip lets them pass
    knob: no spikes under a lower clip: it was those updates
    grad_clip*0.5 grad_clip:0=1 peak_lr*0.5 warmup_steps*2
diverges_after_resume: The loss diverges after a resume
    a knob changed on the resume, above all the learning rate; other code or torch
    --resume=never: no jump in a run that was never stopped: it was the change
    peak_lr*0.5; go back to the earlier settings: report.md lists what was not exact
plateau: The training loss is on a plateau
    the learning rate is now too low or too high; the model has learned what it can
    check.py --only=lr: the range of rates in which the loss falls
    min_lr*10 n_embd*2; another --peak_lr, or fewer steps
overfitting: Validation rises while training falls: overfitting
    the model has seen the same data too often, or is too large for so little data
    knob: validation falls for longer: the model was memorizing
    dropout*2 dropout:0=0.1 weight_decay*2 patience:0=3 max_steps*0.5; best.pt, from before the rise; more data
out_of_memory: Memory ran out
    a batch too large; other work on the device; an evaluation or a sample larger than a step
    bench.py --only=memory: what fills the memory of a step, predicted and measured
    batch_size*0.5 accum_steps*2 grad_checkpoint:false=true; several GPUs, and --shard=true
memory_grows: Memory grows all the time
    tensors kept with their graph, as by total += loss; a list or cache that is never emptied
    bench.py --only=memory: what a step needs; memory beyond that is what is kept
    ; keep numbers, not tensors: loss.detach()
throughput_falls: The throughput falls
    other work on the machine; memory that swaps; a device that slows down when hot
    vmstat 1 5: r above the number of cores: other work; si or so above 0: memory swaps
    ; a machine of its own; the same command resumes the run there
waits_for_data: Training waits for data
    batches are read or made more slowly than they are used; a slow disk
    knob: less waiting: workers can keep up
    num_workers*2 num_workers:0=2; a dataset on a local disk
gpu_idle: The GPU is idle for much of the time
    steps too small to fill it; training waits for data; kernels launched one by one, not compiled
    bench.py --only=profile: where each millisecond of a step goes
    batch_size*2 compile=true num_workers*2 num_workers:0=2
"""
Finding = namedtuple("Finding", "name title shows causes tell reading cure")
ENTRIES = zip(*[iter(TABLE.strip().split("\n"))] * 4, strict=True)
TROUBLES = {
    head.partition(": ")[0]: (head.partition(": ")[2], *map(str.strip, rest))
    for head, *rest in ENTRIES
}


def troubles(run):
    """The Findings of a run, in the order of TABLE."""
    with np.errstate(all="ignore"):  # unknown values are NaN, and show nothing
        found = {name: getattr(detectors, name)(run) for name in TROUBLES}
    return [finding(run, name, shows) for name, shows in found.items() if shows]


def finding(run, name, shows):
    title, causes, tell, tries = TROUBLES[name]
    tell, _, reading = tell.partition(": ")
    knobs, _, cure = tries.partition(";")
    tries = changes(run.info["config"] | run.info["run"], knobs)
    words = [f"--{knob}={value} (now {now})" for knob, value, now in tries]
    cure = ", ".join(filter(None, [*words, cure.strip()]))
    return Finding(name, title, shows, causes, command(run, tell, tries, name), reading, cure)


def changes(knobs, wanted):
    """[(knob, value to try, value now)] of the changes in `wanted` that would change something."""
    tries = []
    for change in wanted.split():
        name, only, how, by = re.fullmatch(r"(\w+):?(\w*)([*=])(\S+)", change).groups()
        now = knobs.get(name)
        is_number = type(now) in (int, float)
        shown = f"{now:g}" if is_number else str(now).lower()
        if how == "=" and now is not None and only in ("", shown) and shown != by:
            tries.append((name, by, shown))
        elif how == "*" and is_number and now:
            value = max(1, round(now * float(by))) if isinstance(now, int) else now * float(by)
            tries.append((name, f"{value:.4g}", shown))
    return tries


def command(run, tell, tries, name):
    """The command to paste; "" if this run has none."""
    script, *flags = [str(word) for word in run.info["command"] or ["train.py"]]
    launcher, ranks = ["python"], run.fact("hardware", "world_size")
    if tell == "knob":
        tell = "".join(f"--{knob}={value}" for knob, value, _ in tries[:1])
    if tell.startswith("--"):
        flags += [tell, f"--out_dir=out/{run.name}_{name}"]
        if ranks > 1:
            launcher = ["torchrun", "--standalone", f"--nproc_per_node={ranks:.0f}"]
    elif ".py " in tell and script.endswith("train.py"):
        tool, only = tell.split()
        script = script.removesuffix("train.py") + tool
        flags = [flag for flag in flags if not flag.startswith("--out_dir=")] + [only]
    else:  # bench.py and check.py know no other script
        return "" if ".py " in tell else tell
    last = {}  # flag -> its last occurrence, which wins
    for flag in flags:
        last.pop(flag.partition("=")[0], None)
        last[flag.partition("=")[0]] = flag
    if tell != "--resume=never":
        last.pop("--resume", None)
    return shlex.join([*launcher, script, *last.values()])
