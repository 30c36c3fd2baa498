"""Where each millisecond goes: measures what train.py really runs, with its own step, data and model.

    python bench.py config/shakespeare.py
    python bench.py config/shakespeare.py --n_layer=6 --n_embd=384 --only=ladder,profile

Takes train.py's flags, and those below. Prints a table for each part and writes bench.json into
out_dir, afresh each time; the lr part adds lr.png. A run that lies there is left alone. Nothing else
should be at work on the machine meanwhile. Exit code 2: bad input; 1: the sanity part found a fault
that would spoil a run (low utilisation is no such fault).
"""

import contextlib
import io
import itertools
import json
import math
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function

import machine
import prepare_data
import record
import train
from configurator import configure, fail, read_knobs
from machine import say
from model import GPT, GPTConfig, configure_optimizers, training_memory

# The measurement
only = ""  # parts, such as peak,ladder; "" = all: peak,ladder,profile,memory,overhead,sanity,lr
rounds = 5  # timings of each thing, in turn with the others; the median counts, [1, inf)
timing_seconds = 0.5  # least length of one timing, (0, inf)
trace = False  # write trace.json from the profile part, for https://ui.perfetto.dev
lr_steps = 100  # of the lr part, [10, inf)

KNOWN_SIZES = {  # published shapes: vocabulary, context, heads, width, layers
    "GPT-2 124M": (50304, 1024, 12, 768, 12),
    "GPT-2 1.5B": (50304, 1024, 25, 1600, 48),
    "Llama 7B": (32000, 2048, 32, 4096, 32),
    "Llama 70B": (32000, 4096, 64, 8192, 80),
}


@dataclass
class Job:
    """What every part measures: the run that the flags describe."""

    device: torch.device
    meta: dict  # of the dataset
    batches: train.Batches
    peak: tuple  # (FLOP/s or None, where the figure is from)
    can_compile: bool
    scratch: Path  # takes the events of runs made here: out_dir may hold a real run

    def fresh_run(self):
        return train.fresh_run(self.scratch, self.meta["vocab_size"], self.device)

    def real_step(self, run):
        """(model, a function that takes the next step of `run`) as train.main has them."""
        model = train.rehearse(run, self.batches, self.device)
        batches = train.load_batches(self.batches, run.state, self.device)
        return model, self.step(run, model, batches)

    def step(self, run, model, batches, **knobs):
        """A function that does what the loop of train.main does to train, with `knobs` of train."""

        def step():
            with setting(train, **knobs):
                lr = train.lr_at(run.state["step"])
                with record_function("data"):
                    tokens, targets = (t.to(self.device, non_blocking=True) for t in next(batches))
                with record_function("train_step"):
                    report = train.train_step(model, run, tokens, targets, lr)
                run.state["step"] += 1
                return report

        return step

    def speed(self, run, seconds):
        tokens_per_sec = train.batch_size * train.accum_steps * train.block_size / seconds
        mfu = run.model.flops_per_token() * tokens_per_sec / (self.peak[0] or math.nan)
        return {"ms": 1000 * seconds, "tokens_per_sec": tokens_per_sec, "mfu": mfu}


@contextlib.contextmanager
def setting(module, **values):
    """Globals of a module as `values` say, for a while; afterwards all are as they were."""
    before = dict(vars(module))
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(before)


def synchronize(device):
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def seconds_of(step, count, device):
    """Mean seconds of a call of step()."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(device)
    return (time.perf_counter() - start) / count


def interleaved(steps, device):
    """{name: median seconds of a call} for {name: function}, timed in turn: A B C A B C ..."""
    counts, times = {}, {name: [] for name in steps}
    for name, step in steps.items():
        step()  # warms up
        counts[name] = max(1, round(timing_seconds / seconds_of(step, 1, device)))
    for _, (name, step) in itertools.product(range(rounds), steps.items()):
        times[name].append(seconds_of(step, counts[name], device))
    return {name: median(each) for name, each in times.items()}


def show(rows, **formats):
    """Print {name: {column: value}} as a table of the columns in `formats`. ".1f M": in millions."""
    cells = [["", *(column.replace("_", " ") for column in formats)]]
    for name, row in rows.items():
        cells.append([name, *(cell(row.get(key, ""), how) for key, how in formats.items())])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for first, *rest in cells:
        columns = zip(rest, widths[1:], strict=True)
        say(f"  {first:<{widths[0]}}" + "".join(f"  {each:>{width}}" for each, width in columns))


def cell(value, how):
    if isinstance(value, str) or value is None or math.isnan(value):
        return "n/a" if not isinstance(value, str) else value
    how, _, unit = how.partition(" ")
    return format(value / {"": 1, "M": 1e6, "G": 1e9, "T": 1e12}[unit], how)


# ---- peak ----------------------------------------------------------------------------------------


def peak(job):
    """Rates of matrix products by dtype and size, the datasheet's beside them, and of memory."""
    device, name = job.device, machine.device_name(job.device)
    sheet = next((p for key, p in machine.PEAKS if device.type == "cuda" and key in name), {})
    sizes = (512, 1024, 2048) if device.type == "cpu" else (1024, 2048, 4096, 8192)
    rates = {dtype: {} for dtype in ("float32", "bfloat16", "float16")}
    for dtype, rate in rates.items():
        for size in sizes:
            if rate and 24 * size**3 / min(rate.values()) > 10:
                break  # emulated: it would take more than ten seconds
            with contextlib.suppress(RuntimeError):  # a dtype that is not known here
                rate[f"n = {size}"] = machine.matmul_rate(device, getattr(torch, dtype), size)
        rate["datasheet"] = sheet.get(dtype)
    source = torch.ones(2**26 if device.type == "cpu" else 2**28, device=device)
    target = torch.empty_like(source)
    copying = min(seconds_of(lambda: target.copy_(source), 1, device) for _ in range(6))
    bandwidth, size = 2 * source.nbytes / copying, source.nbytes / 1e6
    say(f"\npeak: TFLOP/s of an n-cubed matrix product, {torch.get_num_threads()} threads")
    show(rates, **{f"n = {size}": ".2f T" for size in sizes}, datasheet="g T")
    say(f"  memory: {bandwidth / 1e9:.1f} GB/s read and written, copying {size:.0f} MB")
    return {"flops_per_sec": rates, "bytes_per_sec": bandwidth}


# ---- ladder --------------------------------------------------------------------------------------


def ladder(job):
    """What each technique buys on top of those before it. All rungs share one model.

    The first two rungs take a plain optimizer.step(): to skip a bad update without asking the host
    is free in fused optimizers only. MFU is against one peak on all rungs, that of train.dtype.
    """
    device, run = job.device, job.fresh_run()
    betas = train.beta1, train.beta2, train.momentum
    unfused = configure_optimizers(
        run.model, train.optimizer, train.peak_lr, train.weight_decay, *betas, device_type="none"
    )
    plain_run = replace(run, optimizers=unfused)
    plain = {"dtype": "float32", "step_unless": lambda skipped, optimizer: optimizer.step()}
    pageable = map(job.batches.__getitem__, itertools.count())
    model, compiling = run.model, time.perf_counter()
    if job.can_compile:
        with setting(train, compile=True):
            model = train.rehearse(run, job.batches, device)
    compiling = time.perf_counter() - compiling
    with setting(train, num_workers=train.num_workers or 2):
        workers = f"{train.num_workers} workers" + ", pinned" * (device.type == "cuda")
        ahead = train.load_batches(job.batches, run.state, device)

    first = job.step(plain_run, run.model, pageable, **plain)
    compiled = job.step(run, model, pageable)
    rungs = {  # name -> what takes a step, or why there is none
        "float32 eager, waits for the loss": lambda: first().tolist(),
        "no host wait": first,
        "fused optimizer": job.step(run, run.model, pageable, dtype="float32"),
        f"autocast {train.dtype}": job.step(run, run.model, pageable),
        "compile": compiled,
        workers: job.step(run, model, ahead),
        "CUDA graph": f"no CUDA on {device.type}",
    }
    if train.dtype == "float32":
        rungs["autocast float32"] = "nothing smaller is native here"
    if model is run.model:
        rungs["compile"] = "--compile=false, no compiler here, or it failed"
    if device.type == "cuda":
        try:
            rungs["CUDA graph"] = graphed_step(run, model, ahead, device)
        except Exception as error:  # whatever stops a capture: the rung says so
            rungs["CUDA graph"] = str(error).splitlines()[0][:60]
    steps = {name: step for name, step in rungs.items() if callable(step)}
    if train.deterministic:
        steps |= {"with": compiled, "without": indeterministic(compiled)}
    seconds = interleaved(steps, device)
    machine.stop_workers(ahead)

    result, slowest = {}, seconds["float32 eager, waits for the loss"]
    before = slowest
    for name, step in rungs.items():
        result[name] = {"absent": step}
        if name in steps:
            ratios = {"to_before": before / seconds[name], "to_first": slowest / seconds[name]}
            result[name] = job.speed(run, seconds[name]) | ratios
            before = seconds[name]
    price = seconds["with"] / seconds["without"] - 1 if train.deterministic else None
    say(f"\nladder: each technique on top of those before; medians of {rounds}, taken in turn")
    columns = {"ms": ".2f", "tokens_per_sec": ",.0f", "mfu": ".1%"}
    show(result, **columns, to_before=".2f", to_first=".2f", absent="")
    say(f"  mfu: of {cell(job.peak[0], '.3g T')} TFLOP/s ({job.peak[1]})")
    say(f"  deterministic mode costs {cell(price, '.1%')} of a step; compiling, {compiling:.1f} s")
    return {"rungs": result, "compile_seconds": compiling, "deterministic_price": price}


def indeterministic(step):
    """step() outside of deterministic mode."""

    def loose():
        torch.use_deterministic_algorithms(False)
        report = step()
        torch.use_deterministic_algorithms(True)
        return report

    return loose


def graphed_step(run, model, batches, device):
    """A function that replays one captured train_step, each time on a new batch (CUDA only).

    The learning rate is frozen into the graph. The retry after running out of memory stays outside:
    it asks for the state of the random numbers, which no capture allows.
    """
    kept = [t.to(device) for t in next(batches)]
    for group in itertools.chain(*(optimizer.param_groups for optimizer in run.optimizers)):
        group["capturable"] = True
    with setting(train, backward_within_memory=train.forward_backward):
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                train.train_step(model, run, *kept, train.min_lr)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            report = train.train_step(model, run, *kept, train.min_lr)

    def step():
        for old, new in zip(kept, next(batches), strict=True):
            old.copy_(new, non_blocking=True)
        graph.replay()
        return report

    return step


# ---- profile -------------------------------------------------------------------------------------


class MarkedScaler:
    """run.scaler, with the backward pass marked for the profiler."""

    def __init__(self, scaler):
        self.scaler = scaler

    def __getattr__(self, name):
        return getattr(self.scaler, name)

    def scale(self, loss):
        self.loss = self.scaler.scale(loss)
        return self

    def backward(self):
        with record_function("backward"):
            self.loss.backward()


def profile(job):
    """Shares of a step, and its ten most expensive operators, from torch.profiler.

    CPU: host time by region; the optimizer's is what train_step does besides forward and backward. The
    profiler makes a step longer (`slowdown`): a share is of the profiled step, its ms that share of
    the step as measured without. CUDA: the kernels that each region launched, against the step as
    measured without; what is left is idle, and data where the host waited for a batch meanwhile.
    """
    device, run, cuda = job.device, job.fresh_run(), job.device.type == "cuda"
    model, step = job.real_step(run)
    measured = interleaved({"step": step}, device)["step"]

    def marked_model(tokens, targets):
        with record_function("forward"):
            return model(tokens, targets)

    batches = train.load_batches(job.batches, run.state, device)
    step = job.step(replace(run, scaler=MarkedScaler(run.scaler)), marked_model, batches)
    count = max(3, min(50, round(timing_seconds / measured)))
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=count, repeat=1)
    with torch.profiler.profile(activities=activities, schedule=schedule) as profiler:
        for _ in range(1 + count):
            step()
            synchronize(device)
            profiler.step()
    if trace:
        profiler.export_chrome_trace(f"{train.out_dir}/trace.json")

    spans = {name: [] for name in ("ProfilerStep*", "data", "train_step", "forward", "backward")}
    for event in profiler.events():
        if event.name in spans and event.device_type == DeviceType.CPU:
            spans[event.name].append((event.time_range.start, event.time_range.end, event.thread))
    host = {name: sum(end - start for start, end, _ in each) for name, each in spans.items()}
    if cuda:
        spent, whole = kernel_time(profiler.events(), spans), 1e6 * measured * count
        spent["data"] += min(host["data"], max(0.0, whole - sum(spent.values())))
        whole = max(whole, sum(spent.values()))  # kernels that overlap may sum to more
    else:
        spent, whole = {name: host[name] for name in ("forward", "backward")}, host["ProfilerStep*"]
        spent["optimizer"] = host["train_step"] - sum(spent.values())
        spent["data"] = host["data"]
    shares = {name: each / whole for name, each in spent.items()}
    shares["idle"] = 1 - sum(shares.values())
    slowdown = host["ProfilerStep*"] / (1e6 * measured * count)

    own_time = "self_device_time_total" if cuda else "self_cpu_time_total"
    operators = {
        e.key: {"calls": e.count / count, "ms": getattr(e, own_time) / 1e3 / count}
        for e in profiler.key_averages()
        if e.key not in spans and e.device_type == DeviceType.CPU
    }
    top = sorted(operators, key=lambda name: -operators[name]["ms"])[:10]
    operators = {name: operators[name] for name in top}
    ms = 1000 * measured
    say(f"\nprofile: {ms:.2f} ms a step; under the profiler {slowdown:.2f} times that")
    rows = {name: {"ms": share * ms, "share": share} for name, share in shares.items()}
    show(rows | {"sum": {"ms": ms * sum(shares.values())}}, ms=".2f", share=".1%")
    say("  the ten most expensive operators, by their own time under the profiler")
    show(operators, calls="g", ms=".3f")
    return {"step_ms": ms, "shares": shares, "slowdown": slowdown, "operators": operators}


def kernel_time(events, spans):
    """{region: microseconds of its kernels}. What another thread launches is autograd's: backward."""
    spent = dict.fromkeys(("forward", "backward", "optimizer", "data"), 0.0)
    for event in events:
        kernels = [kernel.duration for kernel in event.kernels if kernel.name not in spans]
        at, region = event.time_range.start, "optimizer"
        for name in ("forward", "backward", "data"):
            if any(start <= at < end for start, end, _ in spans[name]):
                region = name
        if event.thread != spans["train_step"][0][2]:
            region = "backward"
        spent[region] += sum(kernels)
    return spent


# ---- memory --------------------------------------------------------------------------------------


def memory(job):
    """Tensor memory of an eager step, predicted and measured; the batch that fits; known sizes."""
    config = train.model_config(job.meta["vocab_size"])
    here = train.record.free_memory(job.device) or 0
    rows, known = {}, {}

    def predict(config, batch_size, optimizer, checkpointed, dtype=train.dtype):
        parts = training_memory(config, batch_size, optimizer, dtype, checkpointed, job.device.type)
        # gradients come as activations go, unless those of a micro-batch before are there already
        overlap = min(parts["gradients"], parts["activations"])
        return parts | {"predicted": sum(parts.values()) - overlap * (train.accum_steps == 1)}

    for checkpointed in (False, True):
        row = predict(config, train.batch_size, train.optimizer, checkpointed)
        with setting(train, grad_checkpoint=checkpointed):
            row["measured"] = measured_memory(job)
        row["error"] = row["predicted"] / row["measured"] - 1
        row["fits"] = 0  # the largest power of two that needs no more than 90% of what is free
        for batch_size in (2**n for n in range(40)):
            need = predict(config, batch_size, train.optimizer, checkpointed)["predicted"]
            row["fits"] = batch_size if need < 0.9 * here else row["fits"]
        rows["with grad_checkpoint" if checkpointed else "without grad_checkpoint"] = row
    say(f"\nmemory: MB of tensors at the peak of an eager step, micro-batch of {train.batch_size};")
    say(f"  fits: the micro-batch that would, by powers of two, in the {here / 1e9:.1f} GB free")
    parts = ("weights", "gradients", "optimizer", "activations", "predicted", "measured")
    show(rows, **dict.fromkeys(parts, ",.1f M"), error="+.1%", fits=",.0f")

    for name, shape in KNOWN_SIZES.items():
        with torch.device("meta"):
            number = GPT(GPTConfig(*shape)).num_params()
        _, block_size, _, width, layers = shape
        # in bfloat16: weights, and keys and values of one full context
        row = {"parameters": number, "inference": 2 * number + 4 * layers * block_size * width}
        for kind, checkpointed in itertools.product(("adamw", "momentum", "sgd"), (False, True)):
            need = predict(GPTConfig(*shape), 1, kind, checkpointed, "bfloat16")
            row[kind + ", ckpt" * checkpointed] = need["predicted"]
        known[name] = row
    say(
        "  known shapes of this model, one sequence of full length, GB: inference in bfloat16; training"
    )
    say("  under autocast with float32 weights, by optimizer; ckpt = with grad_checkpoint")
    show(known, **dict.fromkeys(row, ",.1f G") | {"parameters": ",.2f G"})
    return {"here": rows, "available": here, "known_sizes": known}


def measured_memory(job):
    """Peak bytes of tensors: what stays after a step (weights, moments), and the most that a step holds
    on top of it (gradients, activations)."""
    run, cuda = job.fresh_run(), job.device.type == "cuda"
    tokens, targets = (t.to(job.device) for t in job.batches[0])
    # the first step makes the moments, and what libraries take once
    train.train_step(run.model, run, tokens, targets, train.min_lr)
    run.model.zero_grad(set_to_none=True)
    if cuda:
        torch.cuda.reset_peak_memory_stats(job.device)
        before = torch.cuda.memory_allocated(job.device)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        train.train_step(run.model, run, tokens, targets, train.min_lr)
    if cuda:
        passing = torch.cuda.max_memory_allocated(job.device) - before
    else:
        events = profiler.profiler.kineto_results.events()
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        passing = max(itertools.accumulate(nbytes for _, nbytes in changes))
    stays = [*run.model.parameters(), *run.model.buffers(), *run.ema.values()]
    for moments in itertools.chain(*(o.state.values() for o in run.optimizers)):
        stays += [moment for moment in moments.values() if isinstance(moment, torch.Tensor)]
    return passing + sum(tensor.nbytes for tensor in stays)


# ---- overhead ------------------------------------------------------------------------------------


def overhead(job):
    """train.main's own loop against the bare forward, backward, optimizer.step of one fixed batch.

    Both alternate within one call of train.main: a hook in train_step lets the loop go on for a block
    of steps, then takes as many bare ones. In every second block the loop saves, and the block lasts
    until the file is on the disk; that cost is spread over save_interval. Nothing is evaluated.
    """
    device, run = job.device, job.fresh_run()
    _, step = job.real_step(run)
    step()
    block = max(1, round(timing_seconds / seconds_of(step, 1, device)))
    log_interval = min(train.log_interval, block)  # long steps: logs more often than the run would
    block -= block % log_interval
    del run, step
    real_step, real_saver, savers = train.train_step, record.Saver, []
    bare, loop, inside, began = [], [], [], 0.0  # seconds a step: one entry for each block

    def hooked_step(model, run, tokens, targets, lr):
        nonlocal began
        if run.state["step"] % block == block - 1:  # between two blocks
            synchronize(device)
            if savers[0].thread:
                savers[0].thread.join()
            loop.append((time.perf_counter() - began) / block)
            bare.append(seconds_of(lambda: bare_step(model, run, tokens, targets), block, device))
            inside.append(0.0)
            began = time.perf_counter()
        entered = time.perf_counter()
        report = real_step(model, run, tokens, targets, lr)
        if inside:
            inside[-1] += (time.perf_counter() - entered) / block
        return report

    def saver(*args):
        savers.append(real_saver(*args))
        return savers[-1]

    # block k = 1, 2, ... lasts from step k * block - 1 on; those of even k begin with a save
    flags = {"max_steps": (2 * rounds + 1) * block, "save_interval": 2 * block, "save_minutes": 0.0}
    flags |= {"log_interval": log_interval, "eval_interval": 0, "sample_interval": 0}
    flags |= {"schedule": "constant", "warmup_steps": 0, "peak_lr": 1e-6, "min_lr": 0.0}
    flags |= {"spike_sigma": 0.0, "resume": "never", "report": False, "wandb_log": False}
    folder = job.scratch / "run"
    with setting(train, train_step=hooked_step, evaluate=lambda *_: (1.0, 0.0)):
        with setting(record, Saver=saver):
            run_main(flags | {"out_dir": str(folder)})
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    around = [(before + after) / 2 for before, after in itertools.pairwise(bare)]
    ratios = [each / base - 1 for each, base in zip(loop[1:], around, strict=True)]
    base, ratio = median(bare), median(ratios[::2])
    save = max(0.0, median(ratios[1::2]) - ratio) * base * block
    saving = save / base / train.save_interval if train.save_interval else 0.0
    waits = [row["data_ms"] for row in rows if row["kind"] == "train"]
    result = {
        "bare_ms": 1000 * base,
        "loop_ms": 1000 * base * (1 + ratio),
        "overhead": ratio,
        "least": min(ratios[::2]),
        "most": max(ratios[::2]),
        "train_step_ms": 1000 * median(inside[:-1:2]),
        "data_ms": median(waits),
        "save_ms": 1000 * save,
        "overhead_with_saves": ratio + saving,
    }
    ms, step_ms = result["loop_ms"], result["train_step_ms"]
    blocks = f"{rounds} blocks of {block} steps, a line every {log_interval}"
    say(f"\noverhead: {blocks}, in turn with as many bare steps")
    saves = f"with a save of {1000 * save:.0f} ms every {train.save_interval} steps"
    lines = {
        "bare forward, backward, optimizer.step": {"ms": 1000 * base},
        "train.py's loop": {"ms": ms, "over_bare": ratio},
        "  of which train_step, on the host": {"ms": step_ms},
        "  of which waiting for the batch": {"ms": median(waits)},
        "  of which metrics, log, signals": {"ms": ms - step_ms - median(waits)},
        saves: {"ms": 1000 * base * (1 + ratio + saving), "over_bare": ratio + saving},
    }
    show(lines, ms=".3f", over_bare="+.2%")
    say(f"  single blocks: {min(ratios[::2]):+.2%} to {max(ratios[::2]):+.2%}")
    return result


def bare_step(model, run, tokens, targets):
    """What any training step must do, and nothing else."""
    for optimizer in run.optimizers:
        optimizer.found_inf = None  # of train_step
        optimizer.zero_grad(set_to_none=True)
    micro = run.state["batch_size"]
    for x, y in zip(tokens.split(micro), targets.split(micro), strict=True):
        with train.autocast(x.device):
            _, loss = model(x, y)
        run.scaler.scale(loss / run.state["accum_steps"]).backward()
    for optimizer in run.optimizers:
        run.scaler.step(optimizer)
    run.scaler.update()


def run_main(flags):
    """train.main() with the knobs as they are but for `flags`; silent unless it fails."""
    knobs = {name: getattr(train, name) for name in read_knobs(train.__file__)}
    knobs |= {name: value for name, value in flags.items() if name in knobs}
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    argv, locks, output = sys.argv, record.hold.__defaults__[0], io.StringIO()
    sys.argv, code = [train.__file__, *(f"--{key}={value}" for key, value in knobs.items())], 1
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = train.main()
    finally:
        sys.argv = argv
        for number, handler in handlers.items():
            signal.signal(number, handler)
        while locks:
            locks.pop().close()
        if code:
            say(output.getvalue())
    if code:
        raise RuntimeError(f"train.main() exited with {code}")


# ---- sanity --------------------------------------------------------------------------------------


def sanity(job):
    """What to look at before a long run is started. Returns {check: {ok, found}}, and an example."""
    vocab_size, checks = job.meta["vocab_size"], {}
    tokens, targets = (t.to(job.device) for t in job.batches[0])

    def check(name, ok, found):
        checks[name] = {"ok": bool(ok), "found": found}
        say(f"  {'✓' if ok else '✗' if name != 'utilisation' else '!'} {name}: {found}")

    few = max(1, min(train.batch_size, 4096 // train.block_size))
    losses, norms, reached = [], [], {}
    with setting(train, dropout=0.0, label_smoothing=0.0):
        run = job.fresh_run()
        run.state.update(batch_size=few, accum_steps=1)
        for step in range(200):
            lr = train.peak_lr * min(1, (step + 1) / 20)
            report = train.train_step(run.model, run, tokens[:few], targets[:few], lr).tolist()
            losses.append(report[0])
            norms.append(report[1])
            if step < 3:
                for name, weight in run.model.named_parameters():
                    hit = weight.grad is not None and bool(weight.grad.any())
                    reached[name] = reached.get(name) or hit
            if not losses[-1] > losses[0] / 10:
                break
        say("\nsanity:")
        begin, end, expected = losses[0], losses[-1], math.log(vocab_size)
        found = f"{begin:.3f}; ln {vocab_size} is {expected:.3f}, and 0.3 off is allowed"
        check("loss at initialisation", abs(begin - expected) < 0.3, found)
        found = f"{begin:.3f} to {end:.3f} in {len(losses)} steps on {few} sequences"
        check("one batch overfits", end < begin / 10, found + "; expected a tenth within 200")
        missed = [name for name, hit in reached.items() if not hit]
        found = f"none for {', '.join(missed)}" if missed else "all, within 3 steps"
        check("gradients reach every parameter", not missed, found)
        check("no look into the future", *looks_ahead(run.model, tokens[:few], vocab_size))
    low, high = min(norms[:10]), max(norms[:10])
    found = f"{low:.3g} to {high:.3g} in the first steps, clipped at {train.grad_clip:g}"
    check("gradient norm in range", 1e-3 < low and high < 100, found + "; expected 0.001 to 100")
    shifted = torch.equal(tokens[:, 1:], targets[:, :-1])
    check("targets are the tokens one place on", shifted, f"{tokens.numel():,} compared")
    run = job.fresh_run()
    mfu = job.speed(run, interleaved({"": job.real_step(run)[1]}, job.device)[""])["mfu"]
    found = f"MFU {cell(mfu, '.1%')}; below 10%, a larger --batch_size or model costs little time"
    check("utilisation", not mfu < 0.1, found)
    asked, answer = (t[0, :64].tolist() for t in (tokens, targets))
    asked, answer = prepare_data.decode(asked, job.meta), prepare_data.decode(answer, job.meta)
    say(f"    input  {asked!r}\n    target {answer!r}")
    return {**checks, "example": {"input": asked, "target": answer}}


@torch.no_grad()
def looks_ahead(model, tokens, vocab_size):
    """(ok, what was found): other tokens from the middle on must change what the model says there, and
    nothing before. The model must be a trained one: a new one may ignore past and future alike."""
    middle, other = tokens.size(1) // 2, tokens.clone()
    other[:, middle:] = (other[:, middle:] + 1) % vocab_size
    model.eval()
    change = (model(tokens)[0] - model(other)[0]).abs().amax(dim=(0, 2))
    model.train()
    before, after = change[:middle].amax().item(), change[middle:].amax().item()
    found = f"other tokens from place {middle} on move the logits before it by {before:.1g}"
    return before < 1e-4 < after, f"{found}, after it by {after:.1g}"


# ---- lr ------------------------------------------------------------------------------------------


def lr(job):
    """A range test (Smith 2017, section 3.3): the rate grows from step to step until the loss does.

    Suggests a tenth of the rate at which the smoothed loss is lowest, as fastai's lr_find does: what a
    few steps can stand, a long run cannot.
    """
    run, rates, losses, smooth, average = job.fresh_run(), [], [], [], 0.0
    _, step = job.real_step(run)
    while len(rates) < lr_steps and (not smooth or smooth[-1] < 2 * min(smooth)):
        rates.append(1e-5 * 1e5 ** (len(rates) / (lr_steps - 1)))
        with setting(train, lr_at=lambda step: rates[-1]):
            losses.append(step()[0].item())
        average = 0.8 * average + 0.2 * losses[-1]
        smooth.append(average / (1 - 0.8 ** len(losses)))
    best = smooth.index(min(smooth))
    suggested = float(f"{rates[best] / 10:.1g}")
    draw_lr(rates, losses, smooth, suggested)
    say(
        f"\nlr: {len(rates)} steps from {rates[0]:.2g} to {rates[-1]:.2g}; loss against it in lr.png"
    )
    say(f"  lowest loss {smooth[best]:.3f} at {rates[best]:.2g}: suggested --peak_lr={suggested:g}")
    return {"lr": rates, "loss": losses, "smooth": smooth, "suggested_peak_lr": suggested}


def draw_lr(rates, losses, smooth, suggested):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), dpi=120, layout="constrained")
    axes.plot(rates, losses, ".", color="#8a8a8a", label="loss of a step")
    axes.plot(rates, smooth, color="#0072B2", linewidth=2, label="smoothed")
    axes.axvline(suggested, color="#D55E00", label=f"suggested peak_lr: {suggested:g}")
    axes.axvline(train.peak_lr, color="#009E73", ls="--", label=f"peak_lr now: {train.peak_lr:g}")
    axes.set(xscale="log", xlabel="learning rate", ylabel="training loss, nats")
    axes.set(ylim=(0.9 * min(losses), 1.1 * max(smooth)), title="Learning-rate range test")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(f"{train.out_dir}/lr.png")
    plt.close(figure)


# ---- all of it -----------------------------------------------------------------------------------

PARTS = {part.__name__: part for part in (peak, ladder, profile, memory, overhead, sanity, lr)}


def measure(scratch):
    """All parts that --only names, for the run that the flags describe. Returns the exit code."""
    config, _ = configure(vars(train), globals())
    parts = only.split(",") if only else list(PARTS)
    for part in parts:
        if part not in PARTS:
            fail(f"--only={only}: unknown part {part!r}; expected some of {','.join(PARTS)}")
    device, folder = machine.choose_device(train.device), Path(train.out_dir)
    data_name, data_folder, meta = prepare_data.dataset_of_run(
        train.dataset, train.offline_dataset, train.data_dir, None, say
    )
    try:
        train.model_config(meta["vocab_size"])
    except ValueError as error:
        fail(error)
    can_compile = machine.choose_compile(train.compile, device, math.inf)[0]
    why, peak_flops = train.settle(None, meta["vocab_size"], device)
    train.max_steps = 10**9  # no part ends early; the schedule's length is settled
    rows = train.batch_size * train.accum_steps
    batches = train.open_split(data_folder, "train", meta, rows, range(rows), train.seed)
    job = Job(device, meta, batches, peak_flops, can_compile, scratch)
    settled = {key: getattr(train, key) for key in ("dtype", "compile", "deterministic")}
    facts = {"date": record.now(), "command": sys.argv, "config": config | settled}
    facts |= {"dataset": data_name, **machine.fingerprint(device)}
    say(f"device   {machine.device_name(device)}")
    say(f"model    {train.n_layer} x {train.n_embd} wide, context {train.block_size}")
    say(f"batch    {train.batch_size} x {train.accum_steps} sequences of {data_name}")
    say(f"dtype    {train.dtype} ({why['dtype']})")
    say(f"compile  {train.compile} ({why['compile']}); deterministic {train.deterministic}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for part in parts:
            facts[part] = PARTS[part](job)
            record.write_json(folder / "bench.json", facts)
    except OSError as error:
        fail(f"{folder} cannot be written ({error.strerror}); write --out_dir=FOLDER")
    say(f"\nall of it is in {os.path.relpath(folder / 'bench.json')}")
    checks = facts.get("sanity", {}).items()
    return int(any(not c.get("ok", True) for name, c in checks if name != "utilisation"))


def main():
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        with setting(train), tempfile.TemporaryDirectory() as scratch:
            return measure(Path(scratch))
    finally:
        torch.use_deterministic_algorithms(deterministic)


if __name__ == "__main__":
    sys.exit(main())
