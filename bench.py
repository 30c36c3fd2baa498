"""Where time and memory go: measures the step, data and model that train.py itself runs.

    python bench.py config/shakespeare.py
    python bench.py config/shakespeare.py --n_layer=6 --n_embd=384 --only=ladder,profile
    python bench.py examples/images.py --only=memory    # a script that changes train.py

Takes train.py's flags and those below. Prints the results of each part and writes them to
bench.json in out_dir, which replaces an older one. A run in out_dir is not touched. Run nothing
else on the machine meanwhile. Exit code 2: bad input; 130: Ctrl-C. Whether a run is right is for
check.py to say.
"""

import contextlib
import io
import itertools
import math
import os
import re
import runpy
import sys
import time
import weakref
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from plumbing.configurator import configured, fail
from plumbing.knobs import read_knobs
from plumbing.retry import rehearse
from torch._subclasses import FakeTensorMode
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function
from torch.utils._python_dispatch import TorchDispatchMode

import train
from model import configure_optimizers
from plumbing import audit, checkpoints, console, devices, identity, metrics, nested, peaks
from plumbing.files import write_json
from plumbing.ranks import say
from plumbing.run_folder import RunFolder, now
from plumbing.signals import Signals, stop_workers

# The measurement
only = "peak,ladder,profile,memory,overhead"  # parts to run, in this order
rounds = 5  # timings of each candidate, interleaved; the median counts, [1, inf)
timing_seconds = 0.5  # approximate length of one timing, (0, inf)
trace = False  # write trace.json from the profile part, for https://ui.perfetto.dev

LAUNCH_SECONDS = 3e-6  # of one kernel in a CUDA graph; without a graph the host needs longer
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # at level 5 the profiler prints "USDT:" lines


# ---- the run that is measured --------------------------------------------------------------------


@dataclass(eq=False)
class Job:
    """What every part measures: the run that the flags describe."""

    config: dict  # every knob, before "auto" is resolved
    argv: list  # flags and config files as typed, for subprocesses
    script: str  # train.py, or the script that changes it
    device: torch.device
    datasets: tuple  # as train.open_dataset returns them
    scratch: Path  # run folder of the runs made here, since out_dir may hold a real run
    peak: tuple  # (FLOP/s or None, source of the figure)
    can_compile: bool  # --compile; if "auto", whether compilation is available
    flops_per_token: float = math.nan  # NaN if the model does not tell
    stack: contextlib.ExitStack = None  # closed after each part: ends its workers and subprocesses

    def fresh_run(self):
        config = {name: vars(train)[name] for name in read_knobs(train.__file__)}  # current values
        return train.build_run(config, RunFolder(self.scratch), self.device, self.datasets)

    @property
    def meta(self):
        return self.datasets[-1]["meta"]

    @property
    def is_text(self):
        return "tokenizer" in self.meta

    def batch(self):
        parts = self.datasets[0][0, train.rows_at(0)]
        return [torch.as_tensor(part).to(self.device) for part in parts]

    def rehearsed(self, run):
        """The model with which train.py trains `run`, compiled or not."""
        return rehearse(run, train.forward_backward, self.batch(), train.compile)

    def load_batches(self, run):
        batches = train.load_batches(run)
        self.stack.callback(stop_workers, batches)
        return batches

    def step(self, run, model=None, batches=None):
        """A function that takes the next step of `run`, as the loop of train.train does."""
        model = self.rehearsed(run) if model is None else model
        batches = self.load_batches(run) if batches is None else batches

        def step():
            lr = train.lr_at(run.state["step"])
            with record_function("data"):
                inputs, targets = (devices.upload(t, self.device) for t in next(batches))
            with record_function("train_step"):
                numbers = train.train_step(model, run, inputs, targets, lr)
            train.count_batch(run, targets)
            return numbers

        return step

    def speed(self, seconds):
        rate = train.rows_at(0) * train.block_size / seconds
        mfu = self.flops_per_token * rate / (self.peak[0] or math.nan)
        return {"ms": 1000 * seconds, "tokens_per_sec": rate, "mfu": mfu}


@contextlib.contextmanager
def setting(**values):
    """Set globals of train.py to `values` within the block, or within the function it decorates."""
    before = {name: getattr(train, name) for name in values}
    vars(train).update(values)
    try:
        yield
    finally:
        vars(train).update(before)


# ---- timings and tables --------------------------------------------------------------------------


def seconds_of(step, count, device):
    """Mean seconds per call of step()."""
    devices.synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    devices.synchronize(device)
    return (time.perf_counter() - start) / count


def interleaved(steps, device):
    """Time {name: function} in turn, A B C A B C ...: {name: [seconds per call, by round]}."""
    counts = {}
    for name, step in steps.items():
        step()  # warms up
        counts[name] = max(1, round(timing_seconds / seconds_of(step, 1, device)))
    times = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(seconds_of(step, counts[name], device))
    return times


def median_seconds(step, device):
    return median(interleaved({"": step}, device)[""])


def show(rows, **formats):
    """Print {name: {column: value}} as a table with a column per format; ".1f M" is in millions."""
    cells = [["", *(column.replace("_", " ") for column in formats)]]
    for name, row in rows.items():
        cells.append([name, *(cell(row.get(key, ""), how) for key, how in formats.items())])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for first, *rest in cells:
        columns = zip(rest, widths[1:], strict=True)
        say(f"  {first:<{widths[0]}}" + "".join(f"  {each:>{width}}" for each, width in columns))


def cell(value, how):
    if isinstance(value, str) or value is None or math.isnan(value):
        return value if isinstance(value, str) else "n/a"
    how, _, unit = how.partition(" ")
    return format(value / {"": 1, "M": 1e6, "G": 1e9, "T": 1e12}[unit], how)


# ---- time ----------------------------------------------------------------------------------------


def peak(job):
    """Matrix-product rates by dtype and size, beside the datasheet's, and memory bandwidth."""
    device = job.device
    sizes = (512, 1024, 2048) if device.type == "cpu" else (1024, 2048, 4096, 8192)
    rates = {dtype: {} for dtype in ("float32", "bfloat16", "float16")}
    for dtype, rate in rates.items():
        for size in sizes:
            if rate and 6 * size**3 / min(rate.values()) > 2:
                break  # three products would take over two seconds: an emulated dtype
            with contextlib.suppress(RuntimeError):  # a dtype that this device does not support
                rate[f"n = {size}"], _ = peaks.matmul_rate(device, getattr(torch, dtype), [size])
        rate["datasheet"] = peaks.datasheet_peak(devices.device_name(device), dtype)
    source = torch.ones(2**26 if device.type == "cpu" else 2**28, device=device)
    bandwidth = 2 * source.nbytes / min(seconds_of(source.clone, 1, device) for _ in range(6))
    say(f"\npeak: TFLOP/s of an n-cubed matrix product, {torch.get_num_threads()} threads")
    show(rates, **{f"n = {size}": ".2f T" for size in sizes}, datasheet="g T")
    say(f"  memory: {bandwidth / 1e9:.1f} GB/s, reads plus writes, copying {source.nbytes:,} bytes")
    return {"flops_per_sec": rates, "bytes_per_sec": bandwidth}


def ladder(job):
    """What each technique gains on top of those before it. All rungs share one model. The first has
    an optimizer that is not fused, so the host waits: only then does it know whether to skip. MFU
    is relative to the peak of train.dtype on all rungs."""
    run = job.fresh_run()
    began = time.perf_counter()
    with setting(compile=job.can_compile):
        model = job.rehearsed(run)
    compiling = time.perf_counter() - began
    pageable = (run.train_data[part] for part in train.batches_to_come(run.state))
    with setting(num_workers=train.num_workers or 2):
        workers = f"{train.num_workers} workers" + ", pinned" * (job.device.type == "cuda")
        ahead = job.load_batches(run)
    plain_run = replace(run, optimizers=optimizers_of(run.model, train.optimizer, "none"))
    in_float32 = setting(dtype="float32")
    eager, compiled = job.step(run, run.model, pageable), job.step(run, model, pageable)
    eager_only = model is run.model and "--compile=false, no compiler here, or it failed"
    rungs = {  # name -> a function that takes a step, or why there is none
        "float32, eager, waits for the host": in_float32(job.step(plain_run, run.model, pageable)),
        "fused optimizer, no wait": in_float32(eager),
        f"autocast {train.dtype}": "the run is in it" if train.dtype == "float32" else eager,
        "compile": eager_only or compiled,
        workers: job.step(run, model, ahead),
        "CUDA graph": graphed_step(run, model, ahead),
    }

    def without():
        torch.use_deterministic_algorithms(False)
        compiled()
        torch.use_deterministic_algorithms(True)

    steps = {name: step for name, step in rungs.items() if callable(step)}
    timed = list(steps)
    steps |= {"with": compiled, "without": without} if train.deterministic else {}
    seconds = {name: median(times) for name, times in interleaved(steps, job.device).items()}
    result = {name: {"absent": step} for name, step in rungs.items()}
    for before, name in zip([timed[0], *timed], timed, strict=False):
        ratios = {"to_before": seconds[before] / seconds[name]}
        ratios["to_first"] = seconds[timed[0]] / seconds[name]
        result[name] = job.speed(seconds[name]) | ratios
    price = seconds["with"] / seconds["without"] - 1 if train.deterministic else None
    say(f"\nladder: each technique on top of those before; medians of {rounds}, interleaved")
    columns = {"ms": ".2f", "tokens_per_sec": ",.0f", "mfu": ".1%", "to_before": ".2f"}
    show(result, **columns, to_first=".2f", absent="")
    say(f"  mfu: of {cell(job.peak[0], '.3g T')} TFLOP/s ({job.peak[1]})")
    say(f"  deterministic mode costs {cell(price, '.1%')} of a step; compiling: {compiling:.1f} s")
    return {"rungs": result, "compile_seconds": compiling, "deterministic_price": price}


def optimizers_of(model, kind, device_type):
    knobs = train.peak_lr, train.weight_decay, train.beta1, train.beta2, train.momentum
    return configure_optimizers(model, kind, *knobs, device_type)


def graphed_step(run, model, batches):
    """A function that replays one captured train_step, each time on a new batch, or why there is
    none. The learning rate is frozen into the graph. The retry after running out of memory is
    disabled: it reads the random state, which a capture does not allow. A step that waits for the
    device is not captured: a failed capture would leave the allocator as it is during one."""
    if run.device.type != "cuda":
        return f"no CUDA on {run.device.type}"
    kept = [tensor.to(run.device) for tensor in next(batches)]
    for group in itertools.chain(*(optimizer.param_groups for optimizer in run.optimizers)):
        group["capturable"] = True
    take_step = partial(train.train_step, model, run, *kept, train.min_lr)
    graph = torch.cuda.CUDAGraph()
    with setting(retry_on_oom=lambda run, compute, key: compute()):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                take_step()
                torch.cuda.set_sync_debug_mode("error")
                take_step()
        except Exception as error:
            return f"a step waits: {error}".splitlines()[0][:60]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        with torch.cuda.graph(graph):
            numbers = take_step()

    def step():
        for old, new in zip(kept, next(batches), strict=True):
            old.copy_(new, non_blocking=True)
        graph.replay()
        return numbers

    return step


def profile(job):
    """Where the time of a step goes, and its ten most expensive operators, from torch.profiler.

    CPU: host time per region, as shares of a profiled step, which takes `slowdown` times as long;
    "optimizer" is train_step without forward and backward. CUDA: time of the kernels that a region
    launched, as shares of an unprofiled step; the rest is idle, or data if the host waited for it.
    """
    cuda = job.device.type == "cuda"
    run = job.fresh_run()
    model = job.rehearsed(run)
    batches = job.load_batches(run)
    measured = median_seconds(job.step(run, model, batches), job.device)
    count = max(3, min(50, round(timing_seconds / measured)))
    step = job.step(run, record_function("forward")(model), batches)
    both = record_function("forward_backward")(train.forward_backward)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda
    with setting(forward_backward=both), torch.profiler.profile(activities=activities) as profiler:
        for _ in range(count):
            with record_function("step"):
                step()
                devices.synchronize(job.device)
    if trace:
        profiler.export_chrome_trace(f"{train.out_dir}/trace.json")
    names = ("step", "data", "train_step", "forward_backward", "forward")
    events = [e for e in profiler.events() if e.device_type == DeviceType.CPU]
    spans = {name: [e.time_range for e in events if e.name == name] for name in names}
    host = {name: sum(span.elapsed_us() for span in each) for name, each in spans.items()}
    slowdown = host["step"] / (1e6 * measured * count)
    if cuda:
        spent = kernel_time(events, spans)
        whole = 1e6 * measured * count
        spent["data"] += min(host["data"], max(0.0, whole - sum(spent.values())))
        whole = max(whole, sum(spent.values()))  # kernels that overlap may sum to more
    else:
        both = host["forward_backward"]
        parts = host["forward"], both - host["forward"], host["train_step"] - both, host["data"]
        spent = dict(zip(("forward", "backward", "optimizer", "data"), parts, strict=True))
        whole = host["step"]
    shares = {name: each / whole for name, each in spent.items()}
    shares["idle"] = 1 - sum(shares.values())
    own_time = "self_device_time_total" if cuda else "self_cpu_time_total"
    operators = {
        e.key: {"calls": e.count / count, "ms": getattr(e, own_time) / 1e3 / count}
        for e in profiler.key_averages()
        if e.key not in spans and e.device_type == DeviceType.CPU
    }
    operators = dict(sorted(operators.items(), key=lambda item: -item[1]["ms"])[:10])
    ms = 1000 * measured
    say(f"\nprofile: {ms:.2f} ms a step; under the profiler {slowdown:.2f} times that")
    kernels = sum(len(event.kernels) for event in events) / count
    if cuda:
        limit = 1000 * kernels * LAUNCH_SECONDS
        say(
            f"  {kernels:,.0f} kernels a step: launching them takes {limit:.2f} ms with a CUDA graph"
        )
    rows = {name: {"ms": share * ms, "share": share} for name, share in shares.items()}
    show(rows | {"sum": {"ms": ms * sum(shares.values())}}, ms=".2f", share=".1%")
    say("  the ten most expensive operators by self time under the profiler, per step")
    show(operators, calls="g", ms=".3f")
    found = {"step_ms": ms, "shares": shares, "slowdown": slowdown, "operators": operators}
    return found | ({"kernels": kernels, "launch_ms": limit} if cuda else {})


def kernel_time(events, spans):
    """{region: microseconds of its kernels}. Autograd's own thread launches the backward pass."""
    spent = dict.fromkeys(("forward", "backward", "optimizer", "data"), 0.0)
    main_thread = next(event.thread for event in events if event.name == "train_step")
    for event in events:
        region = "optimizer" if event.thread == main_thread else "backward"
        for name in ("forward", "data"):
            if any(span.start <= event.time_range.start < span.end for span in spans[name]):
                region = name
        spent[region] += sum(k.duration for k in event.kernels if k.name not in spans)
    return spent


def overhead(job):
    """The loop of train.train against bare steps on one fixed batch, with and without clipping.

    One timed call of the loop takes the steps from one console line to the next, without
    evaluations or saves.
    """
    step_seconds = seconds_of(job.step(job.fresh_run()), 2, job.device)
    every = min(train.log_interval, max(1, round(timing_seconds / step_seconds)))
    knobs = "eval_interval sample_interval save_interval save_minutes milestone_interval".split()
    off = dict.fromkeys([*knobs, "spike_sigma", "audit_interval", "warmup_steps"], 0)
    fixed = {"log_interval": every, "schedule": "constant", "peak_lr": 1e-6}
    nothing = dict.fromkeys(("record_evaluation", "print_sample"), lambda *_: None)
    with setting(**off, **fixed, **nothing), contextlib.redirect_stdout(io.StringIO()):
        run = job.fresh_run()
        model = job.rehearsed(run)
        batches = job.load_batches(run)
        batch = [devices.upload(tensor, job.device) for tensor in next(batches)]
        saver = checkpoints.Saver(run, train.keep_last, train.may_roll_back_to)
        others = console.Table(train.max_steps), saver, Signals(), metrics.Clock()
        hooks = {"load_batches": lambda run: batches, "names_to_save": lambda *_: []}

        def loop():
            with setting(max_steps=run.state["step"] + every, **hooks):
                train.train(run, model, *others)

        take_step = partial(train.train_step, model, run, *batch, train.peak_lr)
        steps = {
            "loop": loop,
            "bare": partial(bare_step, model, run, *batch, clips=False),
            "clipping": partial(bare_step, model, run, *batch, clips=True),
            "train_step": take_step,
            "data": partial(next, job.load_batches(job.fresh_run())),
            # without deterministic mode, a repeated step need not agree
            "audit": partial(audit.confirm, run, take_step) if train.deterministic else take_step,
        }
        times = interleaved(steps, job.device)
    times["loop"] = [seconds / every for seconds in times["loop"]]
    ms = {f"{name}_ms": 1000 * median(each) for name, each in times.items()}
    strict = train.deterministic
    ms["audit_ms"] = max(0.0, ms["audit_ms"] - ms["train_step_ms"]) if strict else None
    for kind in ("bare", "clipping"):
        pairs = zip(times["loop"], times[kind], strict=True)  # from the same round
        ms[f"over_{kind}"] = median(loop / bare - 1 for loop, bare in pairs)
    labels = {
        "bare forward, backward, optimizer.step": "bare",
        "the same with clipping": "clipping",
        "train.py's loop": "loop",
        "  of which train_step": "train_step",
        "  of which reading a batch": "data",
        "plus, for each audited step": "audit",
    }
    rows = {label: {"ms": ms[f"{name}_ms"]} for label, name in labels.items()}
    rows["train.py's loop"] |= ms
    say(f"\noverhead: medians of {rounds}, interleaved; the loop at --log_interval={every}")
    show(rows, ms=".3f", over_bare="+.2%", over_clipping="+.2%")
    if strict:
        ms["audit_interval"] = math.ceil(100 * ms["audit_ms"] / ms["loop_ms"])
        say(f"  audits cost at most 1% from --audit_interval={ms['audit_interval']} up")
    return ms


def bare_step(model, run, inputs, targets, clips):
    """What every training step must do, and nothing else."""
    for optimizer in run.optimizers:
        optimizer.found_inf = None  # set by train_step
        optimizer.zero_grad(set_to_none=True)
    train.forward_backward(model, run, inputs, targets, targets.numel())
    if clips:
        for optimizer in run.optimizers:
            run.scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), train.grad_clip or math.inf)
    for optimizer in run.optimizers:
        run.scaler.step(optimizer)
    run.scaler.update()


# ---- memory --------------------------------------------------------------------------------------


class Tensors(TorchDispatchMode):
    """Counts the bytes of the tensors that are made in its `with`, as long as they live."""

    now = peak = 0

    def __enter__(self):
        self.alive = set()
        return super().__enter__()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        for tensor in nested.tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.alive:  # else a view, or an operation in place
                self.count(storage._cdata, storage.nbytes())
                weakref.finalize(storage, self.count, storage._cdata, -storage.nbytes())
        return result

    def count(self, key, nbytes):
        self.alive ^= {key}
        self.now += nbytes
        self.peak = max(self.peak, self.now)


def imagine(job, run, micro_batch):
    """{kind: bytes} of an eager step of `run` on micro_batch sequences, and `predicted`, the peak of
    their sum. {} if the model cannot be run like this.

    The step runs on tensors that have shapes but no content (FakeTensorMode): any size of any model
    can be asked for, whatever memory there is. The kernels' own work space is not seen.
    """
    shapes = [(part.shape[1:], torch.as_tensor(part).dtype) for part in job.datasets[0][0, 1]]
    rows = micro_batch * min(train.accum_steps, 2)  # from the second on, gradients are there
    try:
        with FakeTensorMode(), Tensors() as tensors, job.device:
            model = train.build_model(vars(train), job.meta["vocab_size"])
            batch = [torch.empty(rows, *shape, dtype=dtype) for shape, dtype in shapes]
            optimizers = optimizers_of(model, train.optimizer, job.device.type)
            ema = [torch.empty_like(weight) for weight in model.parameters() if train.ema_decay]
            state = run.state | {"micro_batch": micro_batch}
            run = replace(run, model=model, optimizers=optimizers, state=state)
            for _ in range(2):  # the first step creates the moments
                model.zero_grad(set_to_none=True)
                train.forward_backward(model, run, *batch, batch[1].numel())
                for optimizer in optimizers:
                    optimizer.step()
    except Exception:  # of a model that needs content, or another optimizer
        return {}
    weights = nbytes([*model.parameters(), *model.buffers(), *ema])
    moments = nbytes(optimizer.state_dict() for optimizer in optimizers)
    row = {"weights": weights, "moments": moments, "passing": tensors.peak - weights - moments}
    return row | {"predicted": tensors.peak}


def nbytes(nested_tensors):
    return sum(tensor.nbytes for tensor in nested.tensors(list(nested_tensors)))


def predict(job, run, free):
    """imagine() for this run, and `fits`: the largest power-of-two micro-batch in 90% of `free`
    bytes. {} if the model cannot tell; without `fits` if the system does not say what is free."""
    row = imagine(job, run, train.batch_size)
    if row and free:

        def is_too_much(power):
            return imagine(job, run, 2**power).get("predicted", math.inf) > 0.9 * free

        row["fits"] = 2 ** bisect_left(range(25), True, key=is_too_much) // 2
    return row


def memory(job):
    """Tensor memory of an eager step, predicted and, if it fits, measured; the batch that fits."""
    free = devices.free_memory(job.device)
    rows = {}
    for name in ("without grad_checkpoint", "with grad_checkpoint"):
        with setting(grad_checkpoint=name.startswith("with ")):
            run = job.fresh_run()
            row = predict(job, run, free)
            if row.get("predicted", 0) < (free or math.inf):
                row["measured"] = measured_memory(job, run)
        row["error"] = row.get("predicted", math.nan) / row.get("measured", math.nan) - 1
        rows[name] = row
    say(f"\nmemory: MB of tensors at the peak of an eager step, micro-batch of {train.batch_size};")
    say("  passing: activations, gradients and what else lives only within a step; fits: the")
    say(f"  largest micro-batch, a power of two, in 90% of the {cell(free, '.1f G')} GB free")
    columns = dict.fromkeys(("weights", "moments", "passing", "predicted", "measured"), ",.1f M")
    show(rows, **columns, error="+.1%", fits=",.0f")
    return {"here": rows, "available": free}


def measured_memory(job, run):
    """Peak bytes of tensors: what stays after a step, plus the most that a step adds to it."""
    take_step = partial(train.train_step, run.model, run, *job.batch(), train.min_lr)
    take_step()  # creates the moments, and what libraries allocate once
    run.model.zero_grad(set_to_none=True)
    for optimizer in run.optimizers:
        optimizer.found_inf = None  # or the profiler warns about its memory
    if job.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(job.device)
        before = torch.cuda.memory_allocated(job.device)
        take_step()
        passing = torch.cuda.max_memory_allocated(job.device) - before
    else:
        with torch.profiler.profile(profile_memory=True) as profiler:
            take_step()
        events = profiler.profiler.kineto_results.events()
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        passing = max(itertools.accumulate(nbytes for _, nbytes in changes))
    moments = [optimizer.state_dict() for optimizer in run.optimizers]
    return passing + nbytes([*run.model.parameters(), *run.model.buffers(), run.ema, moments])


PARTS = {f.__name__: f for f in (peak, ladder, profile, memory, overhead)}


# ---- which parts ---------------------------------------------------------------------------------


def job_of(config, argv, script, scratch):
    """(the Job that the flags describe, facts for the JSON file). Does what train.main does before
    it writes its first file, and says what it found."""
    train.check_knobs(config)
    device = devices.choose_device(train.device)
    train.deterministic = devices.set_deterministic(train.deterministic, device)
    datasets = train.open_dataset(None)
    reasons = identity.resolve_auto_knobs(vars(train), config, None, device)
    can_compile, _ = devices.choose_compile(train.compile, device, math.inf)
    peak_flops = peaks.peak_flops(device, train.dtype)
    job = Job(config, argv, script, device, datasets, scratch, peak_flops, can_compile)
    model = job.fresh_run().model
    with contextlib.suppress(Exception):  # of a model that has no answer, or a wrong one
        job.flops_per_token = float(metrics.flops_per_token(model))
    flops = job.flops_per_token * train.rows_at(0) * train.block_size * train.max_steps
    train.compile, reason = devices.choose_compile(train.compile, device, flops)
    train.max_steps = 10**9  # no part ends early; decay_steps already has its value
    resolved = {key: getattr(train, key) for key in ("dtype", "compile", "deterministic")}
    facts = {"date": now(), "command": sys.argv, "dataset": datasets[-1]["name"]}
    facts |= {"config": config | resolved, **devices.fingerprint(device)}
    say(f"device   {devices.device_name(device)}, {torch.get_num_threads()} threads")
    say(f"model    {console.describe_model(model)}")
    say(f"batch    {train.batch_size} x {train.accum_steps} sequences of {facts['dataset']}")
    say(f"dtype    {train.dtype} ({reasons['dtype']})")
    say(f"compile  {train.compile} ({reason}); deterministic {train.deterministic}")
    return job, facts


def script_among(words):
    """(script to run, the other words): train.py, unless one of the words is a script that changes
    train.py and calls its main() under `if __name__ == "__main__"`, such as examples/images.py."""
    for word in words:
        if word.endswith(".py") and os.path.isfile(word):
            if re.search(r"^import train\b", Path(word).read_text(encoding="utf-8"), re.MULTILINE):
                return os.path.abspath(word), [each for each in words if each != word]
    return train.__file__, list(words)


def measure(own, argv):
    """Run the parts that --only names. own: globals() of the script, with its PARTS. Returns what
    its JSON file holds: {part: result}, and facts."""
    name = Path(own["__file__"]).stem
    strict = torch.are_deterministic_algorithms_enabled()
    script, words = script_among(sys.argv[1:] if argv is None else argv)
    if script != train.__file__:
        runpy.run_path(script, run_name="script")
    scopes = {id(scope): scope for scope in (vars(train), globals(), own)}.values()
    try:
        with configured(*scopes, argv=words) as config, TemporaryDirectory() as scratch:
            parts = own["only"].split(",")
            for part in set(parts) - set(own["PARTS"]):
                known = ",".join(own["PARTS"])
                fail(f"--only={own['only']}: unknown part {part!r}; expected some of {known}")
            job, facts = job_of(config, words, script, Path(scratch))
            path = Path(train.out_dir) / f"{name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            say(f"results  {console.shown(path)}: {', '.join(parts)}")
            for part in parts:
                with contextlib.ExitStack() as job.stack:
                    facts[part] = own["PARTS"][part](job)
                write_json(path, facts)
            return facts
    except OSError as error:
        fail(f"{path.parent} cannot be written ({error.strerror}); write --out_dir=FOLDER")
    except KeyboardInterrupt:
        print(f"{name}.py: stopped; {name}.json has the parts that finished", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        torch.use_deterministic_algorithms(strict)


def main(argv=None):
    measure(globals(), argv)


if __name__ == "__main__":
    sys.exit(main())
