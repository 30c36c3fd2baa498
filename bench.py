"""Where time and memory go: measures the step, data and model that train.py itself runs.

    python bench.py config/shakespeare.py
    python bench.py config/shakespeare.py --n_layer=6 --only=profile,ladder
    python bench.py examples/images.py --only=memory    # a fork

Takes train.py's flags and those below; a run in out_dir is not touched. What is compared is timed in
turn: A B C A B C ... A figure is the median of the rounds, ± half of their range without the lowest
and the highest round; it is n/a where that range is more than a quarter of the median: the rounds
disagree. Run nothing else meanwhile."""

import plumbing  # first: it sets what torch reads when it is imported

# isort: split
import contextlib
import copy
import io
import itertools
import math
import os
import re
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch.autograd import DeviceType
from torch.profiler import record_function

import optim
import train
from checks import plain
from plumbing import fail, print0

only = "profile,memory,ladder,workers,overhead"  # parts to measure, in this order
rounds = 5  # timings of each candidate
timing_seconds = 0.5  # approximate length of one timing

MS = 1e-3

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # at level 5 the profiler prints "USDT:" lines


def main(argv: list[str] | None = None) -> int:
    script, words = plumbing.script_among(argv)
    loop = plumbing.load_script(script, train)
    own = plumbing.knobs_in(globals())
    flags = [word for word in words if word.partition("=")[0].removeprefix("--") not in own]
    with plumbing.configured(vars(loop), globals(), argv=words):
        for name in only.split(","):
            if name not in PARTS:
                fail(f"--only={only}: no part {name!r}; there are {', '.join(PARTS)}")
        try:
            for name in only.split(","):
                PARTS[name](loop, [*flags, "--resume=restart"])  # build() then loads no checkpoint
        finally:
            plumbing.kill_workers()  # which ignore signals
    return 0


# ---- timings, figures, tables --------------------------------------------------------------------


def timed(steps, device):
    """{name: [seconds of a call in each round]} of {name: function}, timed in turn."""
    counts = {}
    for name, step in steps.items():
        step()
        counts[name] = max(1, round(timing_seconds / seconds_of(step, 1, device)))
    times = {name: [] for name in steps}
    for name in [*steps] * rounds:
        steps[name]()  # warms up, and uses up what workers have read meanwhile
        times[name].append(seconds_of(steps[name], counts[name], device))
    return times


def seconds_of(step, count, device):
    """Mean seconds of a call of step()."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(device)
    return (time.perf_counter() - began) / count


def synchronize(device):
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def figure(values, form, unit=1.0, least=0.0):
    """The median of the rounds ± half their range, in words. least: a range that is no disagreement,
    however small the median is."""
    values = sorted(value / unit for value in values)
    if len(values) >= 5:
        values = values[1:-1]
    spread = values[-1] - values[0]
    middle = median(values)
    if not spread <= max(middle / 4, least):  # NaN, too
        return "n/a"
    return f"{middle:{form}} ± {spread / 2:{form}}"


def print_times(title, times):
    """A table of {name: [seconds of a step in each round]}; a gain is a ratio within a round."""
    print_row(f"\n{title}", "ms a step", "gain on the one before")
    before = None
    for name, each in times.items():
        gains = [old / new for old, new in zip(before or each, each, strict=True)]
        print_row(f"  {name}", figure(each, ".2f", MS), figure(gains, ".2f") if before else "")
        before = each


def print_row(name, *cells):
    print0(f"{name:<32}" + "".join(f"{cell:>24}" for cell in cells))


def variant(run, **changes):
    """The same run, with the same weights, computed in another way."""
    other = copy.copy(run)
    vars(other).update(changes)
    return other


# ---- time ----------------------------------------------------------------------------------------


def profile(loop, flags):
    """Where the time of a step goes, from torch.profiler, and its ten most expensive operations.

    CPU: time of the host by region, as shares of a profiled step, which takes longer. GPU: time of
    the kernels that a region launched, as shares of an unprofiled step; the rest is idle.
    "optimizer" is train_step without forward and backward."""
    shares = {}
    with loop.build(flags) as run:
        on_gpu = run.device.type == "cuda"
        run.batches = loop.load_batches(run)
        step = partial(loop.take_step, run)
        seconds = timed({"": step}, run.device)[""]
        count = max(2, min(50, round(timing_seconds / median(seconds))))
        run.batches = iter(record_function("data")(partial(next, run.batches)), None)
        run.wrapped = record_function("forward")(run.wrapped)
        marked = record_function("train_step")(loop.train_step)
        with plumbing.setting(vars(loop), {"train_step": marked}):
            for _ in range(rounds):
                with torch.profiler.profile() as profiler:
                    profiled = seconds_of(step, count, run.device)
                averages = profiler.key_averages()
                whole = count * (median(seconds) if on_gpu else profiled)
                for name, spent in regions(averages, on_gpu).items():
                    shares.setdefault(name, []).append(spent / whole)
    shares["idle"] = [1 - sum(each) for each in zip(*shares.values(), strict=True)]
    print_row("\nprofile: a step", "", f"{figure(seconds, '.2f', MS)} ms")
    for name, each in shares.items():
        print_row(f"  {name}", "", figure(each, ".1%", least=0.05))
    by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    print0(averages.table(by, row_limit=10, max_name_column_width=40))


def regions(averages, on_gpu):
    """{region: seconds}, from the averages of a profiler."""
    spent = Counter()
    for average in averages:
        if average.device_type == DeviceType.CPU:
            is_backward = average.key.startswith("autograd::engine::evaluate_function")
            time = average.device_time_total if on_gpu else average.cpu_time_total
            spent["backward" if is_backward else average.key] += time / 1e6
    # on a GPU autograd launches the backward pass in a thread of its own, outside train_step
    within = spent["forward"] + (0 if on_gpu else spent["backward"])
    spent["optimizer"] = spent["train_step"] - within
    return {name: spent[name] for name in ("forward", "backward", "optimizer", "data")}


def ladder(loop, flags):
    """What each technique gains on top of those before it, on one model. The first rung has an
    optimizer that is not fused, so the host waits: only then does it know whether to skip."""
    with loop.build([*flags, "--compile=false", "--num_workers=0"]) as run:
        run.batches = loop.load_batches(run)
        not_fused = loop.configure_optimizer(run.model, run.config, "none")
        for group in not_fused.param_groups:
            group["initial_lr"] = group["lr"]
        fused = variant(run, dtype=torch.float32)
        rungs = {"float32, eager, not fused": variant(fused, optimizer=not_fused)}
        rungs["fused optimizer"] = fused
        if run.dtype != torch.float32:
            rungs[f"autocast {run.dtype}"] = run
        if plumbing.choose_compile("auto", run.device, math.inf, 10**9)[0]:
            rungs["compile"] = run = variant(run, wrapped=plumbing.compiled(run.model))
        steps = {name: partial(loop.take_step, rung) for name, rung in rungs.items()}
        if torch.are_deterministic_algorithms_enabled():
            steps["not deterministic"] = partial(take_step_not_deterministic, loop, run)
            torch._logging.set_logs(recompiles=False)  # it is compiled once more
        print_times("ladder: each on top of those before", timed(steps, run.device))


def take_step_not_deterministic(loop, run):
    torch.use_deterministic_algorithms(False)
    loop.take_step(run)
    torch.use_deterministic_algorithms(True)


def workers(loop, flags):
    """What workers gain that read batches ahead."""
    steps = {}
    with loop.build(flags) as run:
        for count in (0, 1, 2):
            loop.num_workers = count
            each = variant(run, batches=loop.load_batches(run))
            steps[f"{count} workers"] = partial(loop.take_step, each)
        print_times("workers", timed(steps, run.device))


# ---- memory --------------------------------------------------------------------------------------


def memory(loop, flags):
    """Tensor memory at the peak of an eager step. What passes within a step grows with the sequences
    in it: a line through the micro-batch and half of it predicts twice as many, and how many fit
    into 90% of the memory that is free."""
    size = max(2, loop.batch_size)
    flags = [*flags, "--compile=false"]
    half = measured(loop, flags, size // 2)
    whole = measured(loop, flags, size)
    a_sequence = (whole - half) / (size - size // 2)
    try:
        twice = measured(loop, flags, 2 * size)
    except (RuntimeError, MemoryError):  # what fitted once does not fit twice
        twice = math.nan
    print_row("\nmemory: an eager step", "MB predicted", "measured")
    print_row(f"  {size} sequences", "", f"{whole / 1e6:,.1f}")
    predicted = whole + size * a_sequence
    print_row(f"  {2 * size} sequences", f"{predicted / 1e6:,.1f}", f"{twice / 1e6:,.1f}")
    free = free_memory(plumbing.choose_device(loop.device, loop.deterministic))
    fits = size + (0.9 * free - whole) // a_sequence
    print0(f"  {free / 1e9:.1f} GB are free: room for a micro-batch of {fits:,.0f}")


def measured(loop, flags, size):
    """Bytes of tensors at the peak of an eager step on micro-batches of `size` sequences: weights,
    averages, buffers, moments, and what passes within the step."""
    accum_steps = min(loop.accum_steps, 2)  # 2: gradients are there already
    how = [*flags, f"--batch_size={size}", f"--accum_steps={accum_steps}"]
    with loop.build(how) as run:
        batch = loop.batch_at(run, 0, loop.sequences_at(0))
        take_step = partial(loop.train_step, run, *batch, loop.min_lr)
        take_step()  # creates the moments, and what libraries allocate once
        run.model.zero_grad(set_to_none=True)
        tensors = [*run.model.parameters(), *run.model.buffers(), *run.ema.values()]
        for state in run.optimizer.state.values():
            tensors += filter(torch.is_tensor, state.values())
        lasting = sum(tensor.nbytes for tensor in tensors)
        return lasting + most_allocated(take_step, run.device)


def most_allocated(function, device):
    """The most bytes of tensors that are alive at once while function() runs, beside those before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(profile_memory=True) as profiler:
        function()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(nbytes for _, nbytes in changes))


def free_memory(device):
    """Bytes that are free on the device; NaN if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    text = Path("/proc/meminfo").read_text() if sys.platform == "linux" else ""
    kilobytes = re.findall(r"MemAvailable: +(\d+)", text) or [math.nan]
    return 1024 * float(kilobytes[0])


# ---- the overhead of the loop --------------------------------------------------------------------

# What plain.py does as well, and how it does it
EQUAL = (
    "--compile=false --num_workers=0 --ema_decay=0 --warmup_steps=1 --eval_interval=0 --eval_tokens=1 "
    "--save_interval=0 --log_interval=10 --report=false --wandb_log=false"
).split()


def overhead(loop, flags):
    """What train.py's promises cost: the steps of whole runs of train.py and of checks/plain.py, in
    turn and in this process, so with the same settings of torch and of the allocator."""
    if plumbing.script_path():
        print0("\noverhead: n/a: checks/plain.py is the loop of train.py, not that of a script")
        return
    flags = [*flags, *EQUAL]
    steps = max(30, round(10 * timing_seconds / seconds_of_plain(loop, flags, 3)))
    times = {"checks/plain.py": [], "train.py": []}
    for _ in range(rounds):
        times["checks/plain.py"].append(seconds_of_plain(loop, flags, steps))
        times["train.py"].append(seconds_of_train(loop, flags, steps))
    print_times(f"overhead: whole runs of {steps} steps", times)


def seconds_of_plain(loop, flags, steps):
    """Seconds of a step of checks/plain.py in a run of `steps`."""
    with loop.build([*flags, f"--max_steps={steps}"]) as run, contextlib.ExitStack() as stack:
        if optim.emulates_bfloat16(run.device):  # torch's Muon, too, computes in float32 then
            stack.enter_context(patch.object(torch.Tensor, "bfloat16", torch.Tensor.float))
        knobs = SimpleNamespace(**run.config | {"device": run.device.type})
        began = time.perf_counter()
        taken = plain.train(knobs, run.model, run.train_data.tokens)
        for step, (loss, _) in enumerate(taken, 1):
            if step % 10 == 0:  # as train.py logs it
                loss.item()
        synchronize(run.device)
        return (time.perf_counter() - began) / steps


def seconds_of_train(loop, flags, steps):
    """Seconds of a step of train.py in a run of `steps`."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        code = loop.main([*flags, f"--max_steps={steps}", f"--out_dir={folder}/run"])
        if code:  # it was stopped
            raise SystemExit(code)
        state = plumbing.read_json(Path(folder, "run/run.json"))["state"]
        return state["seconds"]["train"] / steps


PARTS = {f.__name__: f for f in (profile, memory, ladder, workers, overhead)}


if __name__ == "__main__":
    plumbing.exit_process(main())
