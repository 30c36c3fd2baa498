"""Where each millisecond goes: measures the step, data and model that train.py itself runs.

    python bench.py config/shakespeare.py --only=sanity     # before a long run: GO or NO-GO
    python bench.py config/shakespeare.py
    python bench.py config/shakespeare.py --n_layer=6 --n_embd=384 --only=ladder,profile
    python bench.py config/shakespeare.py --only=seeds --seeds=5    # how much of a loss is chance

Takes train.py's flags and those below. Prints the results of each part and writes them to
bench.json in out_dir, which replaces an older one; the lr part adds lr.png. A run in out_dir is not
touched. Run nothing else on the machine meanwhile. Exit code 2: bad input; 130: Ctrl-C; 1: NO-GO in
the sanity part, or other bits in a deterministic row of exact. docs/trouble.md explains the checks.
"""

import contextlib
import io
import itertools
import math
import os
import subprocess
import sys
import time
from collections import Counter, namedtuple
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from statistics import mean, median, stdev
from tempfile import TemporaryDirectory

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function

import report
import train
from model import configure_optimizers
from plumbing import audit, checkpoints, console, devices, identity, metrics, nested, peaks
from plumbing.configurator import configured, fail
from plumbing.files import read_json, write_json
from plumbing.knobs import read_knobs
from plumbing.memory import training_memory
from plumbing.ranks import say, world_size
from plumbing.retry import rehearse
from plumbing.run_folder import RunFolder, now
from plumbing.signals import Signals, stop_workers
from plumbing.tokenizers import decode
from plumbing.windows import OrderedWindows
from reporting.record import read_run

# The measurement
only = "peak,ladder,profile,memory,overhead,sanity,lr"  # parts to run; also: exact, seeds (minutes)
rounds = 5  # timings of each candidate, interleaved; the median counts, [1, inf)
timing_seconds = 0.5  # approximate length of one timing, (0, inf)
trace = False  # write trace.json from the profile part, for https://ui.perfetto.dev
lr_steps = 100  # most steps of the learning-rate range test (lr and sanity parts), [10, inf)
exact_seconds = 60.0  # total length of the tries in the exact part, or in the tries part, (0, inf)
seeds = 5  # full runs in the seeds part, with consecutive seeds from --seed, [2, inf)

KNOWN_SIZES = {  # published (GPT-2's vocabulary padded): vocabulary, context, heads, width, layers
    "GPT-2 124M": (50304, 1024, 12, 768, 12),
    "GPT-2 1.5B": (50304, 1024, 25, 1600, 48),
    "Llama 7B": (32000, 2048, 32, 4096, 32),
    "Llama 70B": (32000, 4096, 64, 8192, 80),
}
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # at level 5 the profiler prints "USDT:" lines


@dataclass
class Job:
    """What every part measures: the run that the flags describe."""

    config: dict  # every knob, before "auto" is resolved
    argv: list  # flags and config files as typed, for subprocesses
    device: torch.device
    datasets: tuple  # as train.open_dataset returns them
    scratch: Path  # run folder of the runs made here, since out_dir may hold a real run
    peak: tuple  # (FLOP/s or None, source of the figure)
    can_compile: bool  # --compile; if "auto", whether compilation is available
    flops_per_token: float = math.nan  # NaN if the model does not tell
    step_seconds: float = 0.0  # of an eager step; from the sanity part on, of the real step
    stack: contextlib.ExitStack = None  # closed after each part: ends its workers and subprocesses

    def fresh_run(self):
        config = {name: vars(train)[name] for name in read_knobs(train.__file__)}  # current values
        return train.build_run(config, RunFolder(self.scratch), self.device, self.datasets)

    def batch(self):
        return [tensor.to(self.device) for tensor in self.datasets[0][0, train.rows_at(0)]]

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

    @cached_property  # used by the sanity and lr parts
    def range_test(self):
        """A range test (Smith 2017, section 3.3): raise the rate each step until the smoothed loss
        is twice its minimum. Suggests a tenth of the rate at that minimum, as fastai's lr_find
        does: a long run does not tolerate what a few steps do."""
        rates, losses, smooth = [], [], []
        average = 0.0
        step = self.step(self.fresh_run())
        while len(rates) < lr_steps and (not smooth or smooth[-1] < 2 * min(smooth)):
            rates.append(1e-5 * 1e5 ** (len(rates) / (lr_steps - 1)))
            with setting(lr_at=lambda step: rates[-1]):
                losses.append(step()["loss"].item())
            average = 0.8 * average + 0.2 * losses[-1]
            smooth.append(average / (1 - 0.8 ** len(losses)))
        suggested = float(f"{rates[smooth.index(min(smooth))] / 10:.1g}")
        return {"lr": rates, "loss": losses, "smooth": smooth, "suggested_peak_lr": suggested}

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
    """What each technique gains on top of those before it. All rungs share one model.

    The first two call plain optimizer.step(), because only fused optimizers can skip a bad update
    without a host wait. MFU is relative to the peak of train.dtype on all rungs.
    """
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
    plain = setting(dtype="float32", step_unless=lambda skipped, optimizer: optimizer.step())
    first = plain(job.step(plain_run, run.model, pageable))
    eager = job.step(run, run.model, pageable)
    compiled = job.step(run, model, pageable)

    def without():
        torch.use_deterministic_algorithms(False)
        compiled()
        torch.use_deterministic_algorithms(True)

    rungs = {  # name -> a function that takes a step, or why there is none
        "float32 eager, waits for the loss": lambda: first()["loss"].item(),
        "no host wait": first,
        "fused optimizer": setting(dtype="float32")(eager),
        f"autocast {train.dtype}": eager,
        "compile": compiled,
        workers: job.step(run, model, ahead),
        "CUDA graph": f"no CUDA on {job.device.type}",
    }
    if train.dtype == "float32":
        rungs["autocast float32"] = "the run is in float32"
    if model is run.model:
        rungs["compile"] = "--compile=false, no compiler here, or it failed"
    if job.device.type == "cuda":
        try:
            rungs["CUDA graph"] = graphed_step(run, model, ahead)
        except Exception as error:  # whatever prevents the capture is shown in the rung
            rungs["CUDA graph"] = str(error).splitlines()[0][:60]
    steps = {name: step for name, step in rungs.items() if callable(step)}
    if train.deterministic:
        steps |= {"with": compiled, "without": without}
    seconds = {name: median(times) for name, times in interleaved(steps, job.device).items()}
    result = {name: {"absent": step} for name, step in rungs.items()}
    timed = [name for name in rungs if name in steps]
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
    """A function that replays one captured train_step, each time on a new batch (CUDA only). The
    learning rate is frozen into the graph. The retry after running out of memory is disabled: it
    reads the random state, which a capture does not allow."""
    kept = [tensor.to(run.device) for tensor in next(batches)]
    for group in itertools.chain(*(optimizer.param_groups for optimizer in run.optimizers)):
        group["capturable"] = True
    take_step = partial(train.train_step, model, run, *kept, train.min_lr)
    with setting(retry_on_oom=lambda run, compute, key: compute()):
        graph = torch.cuda.CUDAGraph()
        devices.synchronize(run.device)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(3):
                take_step()
        with torch.cuda.graph(graph):
            numbers = take_step()

    def step():
        for old, new in zip(kept, next(batches), strict=True):
            old.copy_(new, non_blocking=True)  # only CUDA has graphs
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
    whole = host["step"]
    slowdown = whole / (1e6 * measured * count)
    spent = {
        "forward": host["forward"],
        "backward": host["forward_backward"] - host["forward"],
        "optimizer": host["train_step"] - host["forward_backward"],
        "data": host["data"],
    }
    if cuda:
        spent = kernel_time(events, spans)
        whole = 1e6 * measured * count
        spent["data"] += min(host["data"], max(0.0, whole - sum(spent.values())))
        whole = max(whole, sum(spent.values()))  # kernels that overlap may sum to more
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
    rows = {name: {"ms": share * ms, "share": share} for name, share in shares.items()}
    show(rows | {"sum": {"ms": ms * sum(shares.values())}}, ms=".2f", share=".1%")
    say("  the ten most expensive operators by self time under the profiler, per step")
    show(operators, calls="g", ms=".3f")
    return {"step_ms": ms, "shares": shares, "slowdown": slowdown, "operators": operators}


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


def memory(job):
    """Tensor memory of an eager step, predicted and measured; the batch that fits; known shapes."""
    free = devices.free_memory(job.device) or 0
    here = {}
    for name in ("without grad_checkpoint", "with grad_checkpoint"):
        with setting(grad_checkpoint=name.startswith("with ")):
            run = job.fresh_run()
            row = predict_here(job, run, free)
            row["measured"] = measured_memory(job, run)
        if row["predicted"]:
            row["error"] = row["predicted"] / row["measured"] - 1
        here[name] = row
    say(f"\nmemory: MB of tensors at the peak of an eager step, micro-batch of {train.batch_size};")
    say(f"  fits: the largest micro-batch, a power of two, in 90% of the {free / 1e9:.1f} GB free")
    parts = ("weights", "gradients", "optimizer", "activations", "predicted", "measured")
    show(here, **dict.fromkeys(parts, ",.1f M"), error="+.1%", fits=",.0f")
    known = {name: known_memory(job, *shape) for name, shape in KNOWN_SIZES.items()}
    say("  known shapes of this model, GB for one full sequence: bfloat16 inference with KV cache;")
    say("  training in autocast with float32 weights, by optimizer; ckpt = with grad_checkpoint")
    show(known, **dict.fromkeys(known["Llama 70B"], ",.1f G") | {"parameters": ",.2f G"})
    return {"here": here, "available": free, "known_sizes": known}


def predict_here(job, run, free):
    """predict() for this run, and `fits`: the largest power-of-two micro-batch in 90% of `free`."""
    needs = partial(predict, job, run.model, run.optimizers, train.dtype)
    row = needs(train.batch_size)
    if row["predicted"]:
        sizes = [2**n for n in range(40) if needs(2**n)["predicted"] < 0.9 * free]
        row["fits"] = max(sizes, default=0)
    return row


def predict(job, model, optimizers, dtype, micro_batch):
    """{kind: bytes} of training_memory, and `predicted`, their peak, or None if unknown."""
    where = job.device.type, world_size()
    parts = training_memory(model, optimizers, micro_batch, dtype, *where)
    if None in parts.values():
        return parts | {"predicted": None}
    # gradients replace activations, unless an earlier micro-batch has left its gradients
    overlap = min(parts["gradients"], parts["activations"]) * (train.accum_steps == 1)
    return parts | {"predicted": sum(parts.values()) - overlap}


def known_memory(job, vocab_size, block_size, n_head, n_embd, n_layer):
    """{what: bytes} and `parameters`, their number, for a shape built on the meta device."""
    shape = {"block_size": block_size, "n_head": n_head, "n_embd": n_embd, "n_layer": n_layer}
    needs = {}
    for kind, checkpointed in itertools.product(("adamw", "momentum", "sgd"), (False, True)):
        with setting(**shape, grad_checkpoint=checkpointed), torch.device("meta"):
            model = train.build_model(vars(train), vocab_size)
        need = predict(job, model, optimizers_of(model, kind, "meta"), "bfloat16", 1)
        needs[kind + ", ckpt" * checkpointed] = need["predicted"]
    number = sum(weight.numel() for weight in model.parameters())
    keys_and_values = 2 * n_layer * block_size * n_embd
    return {"parameters": number, "inference": 2 * (number + keys_and_values)} | needs


def measured_memory(job, run):
    """Peak bytes of tensors: what stays after a step, plus the most that a step adds to it."""
    cuda = job.device.type == "cuda"
    take_step = partial(train.train_step, run.model, run, *job.batch(), train.min_lr)
    take_step()  # creates the moments, and what libraries allocate once
    run.model.zero_grad(set_to_none=True)
    for optimizer in run.optimizers:
        optimizer.found_inf = None  # or the profiler warns about its memory
    if cuda:
        torch.cuda.reset_peak_memory_stats(job.device)
        before = torch.cuda.memory_allocated(job.device)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        take_step()
    if cuda:
        passing = torch.cuda.max_memory_allocated(job.device) - before
    else:
        events = profiler.profiler.kineto_results.events()
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        passing = max(itertools.accumulate(nbytes for _, nbytes in changes))
    moments = [optimizer.state_dict() for optimizer in run.optimizers]
    stays = [*run.model.parameters(), *run.model.buffers(), *run.ema.values(), moments]
    return passing + sum(tensor.nbytes for tensor in nested.tensors(stays))


def overhead(job):
    """The loop of train.train against bare steps on one fixed batch, with and without clipping.

    One timed call of the loop takes the steps from one console line to the next. It does not
    evaluate or save; a save is timed at the end.
    """
    every = min(train.log_interval, max(1, round(timing_seconds / job.step_seconds)))
    knobs = "eval_interval sample_interval save_interval save_minutes milestone_interval".split()
    off = dict.fromkeys([*knobs, "spike_sigma", "audit_interval", "warmup_steps"], 0)
    fixed = {"log_interval": every, "schedule": "constant", "peak_lr": 1e-6}
    nothing = dict.fromkeys(("record_evaluation", "print_sample"), lambda *_: None)
    with setting(**off, **fixed, **nothing), contextlib.redirect_stdout(io.StringIO()):
        run = job.fresh_run()
        model = job.rehearsed(run)
        batches = job.load_batches(run)
        batch = [devices.upload(tensor, job.device) for tensor in next(batches)]
        table = console.Table(train.max_steps)
        saver = checkpoints.Saver(run, train.keep_last, train.may_roll_back_to)
        others = table, saver, Signals(), metrics.Clock()
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
        save = partial(saver.save, [checkpoints.file_name(run.state["step"])], required=True)
        save()
        times["save"] = [seconds_of(save, 1, job.device)]
    times["loop"] = [seconds / every for seconds in times["loop"]]
    ms = {f"{name}_ms": 1000 * median(each) for name, each in times.items()}
    strict = train.deterministic
    ms["audit_ms"] = max(0.0, ms["audit_ms"] - ms["train_step_ms"]) if strict else None
    for kind in ("bare", "clipping"):
        pairs = zip(times["loop"], times[kind], strict=True)  # from the same round
        ms[f"over_{kind}"] = median(loop / bare - 1 for loop, bare in pairs)
    rows = {
        "bare forward, backward, optimizer.step": {"ms": ms["bare_ms"]},
        "the same with clipping": {"ms": ms["clipping_ms"]},
        "train.py's loop": ms | {"ms": ms["loop_ms"]},
        "  of which train_step": {"ms": ms["train_step_ms"]},
        "  of which reading a batch": {"ms": ms["data_ms"]},
        "plus, for each save, until it is on disk": {"ms": ms["save_ms"]},
        "plus, for each audited step": {"ms": ms["audit_ms"]},
    }
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


Check = namedtuple("Check", "name fine passable found good")  # a fault if neither fine nor passable


def sanity(job):
    """The checks before a long run, in order. "checks" is {name: {ok, warning, found, good}}.

    A fault makes a run worthless: NO-GO. A warning is outside the bounds that courses and papers
    give; a good run may be, too.
    """
    checks = {}
    say("\nsanity:")
    for part in (learning_checks, speed_check, rate_check, memory_checks, cost_check):
        for name, fine, passable, found, good in part(job):
            mark = "✓" if fine else "!" if passable else "✗"
            say(f"  {mark} {name}: {found}; good: {good}")
            checks[name] = {"ok": mark != "✗", "warning": mark == "!", "found": found, "good": good}
    example = [decode(t[0, :64].cpu(), job.datasets[-1]["meta"]) for t in job.batch()]
    say("    input  {!r}\n    target {!r}".format(*example))
    faults = [name for name, check in checks.items() if not check["ok"]]
    warnings = [name for name, check in checks.items() if check["warning"]]
    say(f"  NO-GO: {', '.join(faults)}" if faults else "  GO")
    if faults or warnings:
        say(f"  docs/trouble.md says what to do about: {', '.join(faults + warnings)}")
    return {"checks": checks, "example": example, "go": not faults}


def learning_checks(job):
    """Can this loop learn at all? Up to 200 steps on one small batch, which it should memorize."""
    vocab_size = job.datasets[-1]["meta"]["vocab_size"]
    few = max(1, min(train.batch_size, 4096 // train.block_size))
    losses, norms, reached = [], [], set()
    with setting(dropout=0.0, label_smoothing=0.0, batch_size=few, accum_steps=1):
        run = job.fresh_run()
        inputs, targets = job.batch()
        for step in range(200):
            lr = train.peak_lr * min(1, (step + 1) / 20)
            numbers = train.train_step(run.model, run, inputs, targets, lr)
            losses.append(numbers["loss"].item())
            norms.append(numbers["grad_norm"].item())
            if step < 3:
                weights = [(n, w) for n, w in run.model.named_parameters() if w.grad is not None]
                reached |= {name for name, weight in weights if weight.grad.any()}
            if not losses[-1] > losses[0] / 10:
                break
        causal, moves = looks_ahead(run.model, inputs, vocab_size)
    begin, end, took = losses[0], losses[-1], len(losses)
    learned = end < begin / 10
    found = f"{begin:.3f} to {end:.3f} in {took} steps on {few} sequences"
    yield Check("one batch overfits", learned and took <= 100, learned, found, "a tenth within 100")
    uniform = math.log(vocab_size)
    near = abs(begin - uniform) < 0.3
    found = f"{begin:.3f}; ln {vocab_size} is {uniform:.3f}"
    yield Check("loss at initialization", near, False, found, "within 0.3 of it")
    missed = [name for name, _ in run.model.named_parameters() if name not in reached]
    found = f"none for {', '.join(missed)}" if missed else "every one, within 3 steps"
    yield Check("gradients reach every parameter", not missed, False, found, "every one")
    low, middle, high = min(norms[:10]), median(norms[:10]), max(norms[:10])
    usual = 0.1 <= middle <= 2
    sane = 1e-3 < low and high < 100
    found = f"{low:.3g} to {high:.3g}, median {middle:.3g}, in the first {len(norms[:10])} steps"
    yield Check("gradient norm in range", usual and sane, sane, found, "a median of 0.1 to 2")
    yield Check("no look into the future", causal, False, moves, "under 0.0001 before it")
    shifted = torch.equal(inputs[:, 1:], targets[:, :-1])
    name = "targets are the tokens one place on"
    yield Check(name, shifted, False, f"{inputs.numel():,} compared", "every one")


def speed_check(job):
    """Is the device busy? The step is the real one, compiled if the run is."""
    job.step_seconds = median_seconds(job.step(job.fresh_run()), job.device)  # cost_check uses it
    busy = devices.gpu_util(job.device)  # None: no GPU, or no NVML
    mfu = job.speed(job.step_seconds)["mfu"]
    fine = not mfu < 0.1 and (busy is None or busy > 85)
    found = f"MFU {cell(mfu, '.1%')}" + (f", GPU busy {busy}%" if busy is not None else "")
    good = "MFU above 10%, a GPU busy above 85%"
    yield Check("utilization", fine, True, found, good)


def rate_check(job):
    """Is peak_lr within a factor of ten of what the range test suggests?"""
    suggested = job.range_test["suggested_peak_lr"]
    near = suggested / 10 <= train.peak_lr <= 10 * suggested
    found = f"--peak_lr={train.peak_lr:g}, and the range test suggests {suggested:g}"
    yield Check("learning rate", near, True, found, "within a factor of 10")


def memory_checks(job):
    """Does a step fit, and what would fit? Predicted, so that memory need not run out to tell."""
    free = devices.free_memory(job.device)
    row = predict_here(job, job.fresh_run(), free or 0)
    if not free or row["predicted"] is None:
        return  # the system or the model does not tell
    found = f"{row['predicted'] / 1e9:.3f} GB of tensors; {free / 1e9:.1f} GB free"
    fits = row["predicted"] < 0.9 * free
    # on a GPU this raises, and train.py halves the micro-batch; on a CPU Linux kills the process
    good = "under 90% of it"
    yield Check("memory of a step", fits, job.device.type == "cuda", found, good)
    found = f"micro-batches of up to {row['fits']:,} sequences; --batch_size={train.batch_size}"
    yield Check("what fits", row["fits"] >= 1, False, found, "at least one")


def cost_check(job):
    """How long will it take, and what will it cost? From real steps and part of an evaluation."""
    run = job.fresh_run()
    max_steps = job.config["max_steps"]  # train.max_steps is 10**9 here
    n_targets = 4 * train.batch_size * train.block_size
    few = OrderedWindows(run.val_data.tokens, train.block_size, n_targets)
    evaluate = partial(train.evaluate, replace(run, val_data=few))
    evaluation = median_seconds(evaluate, job.device) * len(run.val_data) / len(few)
    times = 1 + math.ceil(max_steps / (train.eval_interval or max_steps))
    hours = (max_steps * job.step_seconds + times * evaluation) / 3600
    price = train.dollars_per_hour
    cost = f"${hours * price:.2f} at ${price:g} an hour" if price else "--dollars_per_hour tells"
    found = f"{hours:.3f} hours ({max_steps:,} steps of {1000 * job.step_seconds:.1f} ms, "
    found += f"{times} evaluations of {evaluation:.1f} s); {cost}"
    yield Check("hours and cost", True, True, found, "what you mean to spend")


@torch.no_grad()
def looks_ahead(model, inputs, vocab_size):
    """(ok, finding): changing the tokens from the middle on must change the logits from there on
    and none before. Needs a trained model: a new one may ignore past and future alike."""
    middle = inputs.size(1) // 2
    other = inputs.clone()
    other[:, middle:] = (other[:, middle:] + 1) % vocab_size
    model.eval()
    change = (model(inputs) - model(other)).abs().amax(dim=(0, 2))
    model.train()
    before, after = change[:middle].max().item(), change[middle:].max().item()
    found = f"other tokens from place {middle} on move the logits before it by {before:.1g}"
    return before < 1e-4 < after, f"{found}, after it by {after:.1g}"


def lr(job):
    """Plot the loss of Job.range_test against the learning rate."""
    found = job.range_test
    rates, losses, smooth = found["lr"], found["loss"], found["smooth"]
    suggested = found["suggested_peak_lr"]
    figure = report.new_figure(8, 5)
    axes = figure.add_subplot(xscale="log", xlabel="learning rate", ylabel="training loss, nats")
    axes.plot(rates, losses, ".", color="#8a8a8a", label="loss of a step")
    axes.plot(rates, smooth, color=report.BLUE, lw=2, label="smoothed")
    axes.axvline(suggested, color=report.VERMILION, label=f"suggested peak_lr: {suggested:g}")
    axes.set_ylim(0.9 * min(losses), 1.1 * max(smooth))
    report.legend(axes)
    figure.savefig(f"{train.out_dir}/lr.png")
    best = smooth.index(min(smooth))
    say(f"\nlr: {len(rates)} steps, rates up to {rates[-1]:.2g}; plotted in lr.png")
    say(f"  lowest loss {smooth[best]:.3f} at {rates[best]:.2g}: suggested --peak_lr={suggested:g}")
    return found


def exact(job):
    """Repeat forward and backward of one batch on fixed weights; compare the loss and gradients.

    Each setting runs in its own process, first alone, then beside as many others as there are CPUs
    (on a GPU, two). Settings differ in one thing at a time, so that the rows tell what is at fault.
    """
    mode = "compiled" if train.compile else "eager"
    settings = {  # name -> environment, compile, deterministic
        "eager": ({}, False, True),
        "eager, not deterministic": ({}, False, False),
        "compiled": ({}, True, True),
        "compiled, not deterministic": ({}, True, False),
        f"{mode}, 1 thread": ({"OMP_NUM_THREADS": "1"}, train.compile, True),
        f"{mode}, without AMX": ({"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}, train.compile, True),
    }
    settings = {name: each for name, each in settings.items() if each[1] <= job.can_compile}
    seconds = exact_seconds / (2 * len(settings))
    load = {"only": "tries", "exact_seconds": 1e9, "out_dir": job.scratch / "load"}
    folder = job.scratch / "tries"
    rows = {}
    for n_load in (0, os.cpu_count() if job.device.type == "cpu" else 2):
        for _ in range(n_load):
            start(job, __file__, {"OMP_NUM_THREADS": "1"}, wait=False, **load)
        for name, (environment, compiled, strict) in settings.items():
            knobs = {"exact_seconds": seconds, "compile": compiled, "deterministic": strict}
            start(job, __file__, environment, only="tries", out_dir=folder, **knobs)
            row = read_json(folder / "bench.json")["tries"] | {"deterministic": strict}
            rows[name + ", under load" * (n_load > 0)] = row
    strict = [row for row in rows.values() if row["deterministic"]]
    tries, differ = (sum(row[key] for row in strict) for key in ("tries", "differ"))
    say("\nexact: forward and backward; bits: hash of the most frequent result; differ: all others")
    show(rows, tries=",.0f", distinct=",.0f", differ=",.0f", bits="", where="")
    say(f"  deterministic: {tries:,} tries, of which {differ:,} differ")
    if not differ:  # (1 - 3 / n) ** n is about 0.05
        say(f"  so fewer than one try in {max(1, tries // 3):,} differs, with 95% confidence")
    return {"rows": rows, "tries": tries, "differ": differ}


def start(job, script, environment, wait=True, **knobs):
    """Run `script` in a subprocess, with this run's flags overridden by `knobs`. It has its own
    session: Ctrl-C reaches only bench.py, which then ends the subprocess."""
    own = tuple(f"--{name}=" for name in read_knobs(__file__))
    flags = [each for each in job.argv if not each.startswith(own)]
    flags += [f"--{name}={value}" for name, value in knobs.items()]
    options = {"env": os.environ | environment, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, script, *flags], start_new_session=True, **options)
    job.stack.callback(process.wait)
    job.stack.callback(process.kill)
    output = process.communicate()[0].decode()[-2000:] if wait else ""
    if wait and process.returncode:
        command = " ".join([script, *flags])
        raise RuntimeError(f"{command} exited with {process.returncode}:\n{output}")


def tries(job):
    """One row of exact: the results of the same forward and backward, repeated."""
    parent = os.getppid()
    run = job.fresh_run()
    with torch.no_grad():
        for weight in run.model.parameters():  # the zeros of a new model would make gradients zero
            weight += 0.02 * torch.randn(weight.shape).to(weight.device)
    model = job.rehearsed(run)
    batch = job.batch()
    before = nested.clone(run.checkpoint())
    first = None
    results, tensors = Counter(), Counter()
    end = time.monotonic() + exact_seconds
    while not results or time.monotonic() < end and os.getppid() == parent:
        checkpoints.restore(run, before)
        run.model.zero_grad(set_to_none=True)
        loss = train.forward_backward(model, run, *batch, batch[1].numel())
        gradients = {name: w.grad for name, w in run.model.named_parameters()}
        found = {name: g for name, g in gradients.items() if g is not None} | {"loss": loss}
        bits = [each.cpu().contiguous().view(-1).view(torch.uint8) for each in found.values()]
        results[sha256(torch.cat(bits).numpy()).hexdigest()] += 1
        first = first or nested.clone(found)
        if len(results) > 1:
            tensors.update(audit.bits_that_differ(first, found).keys())
    [(bits, most)] = results.most_common(1)
    counts = {"tries": results.total(), "distinct": len(results), "differ": results.total() - most}
    say(f"\ntries: {counts}")
    return counts | {"bits": bits[:8], "where": ", ".join(tensors), "tensors": dict(tensors)}


def seeds_part(job):
    """Full runs of train.py that differ only in their seed: how much of a final loss is chance?

    The final weights are also evaluated on each half of the validation split: knobs chosen on the
    first half cannot flatter the second.
    """
    if len(job.datasets[1]) < 2:
        fail("--only=seeds: a validation split of one window has no halves; lower --block_size")
    say(f"\nseeds: {seeds} runs of train.py")
    runs = {}
    for seed in range(train.seed, train.seed + seeds):
        with TemporaryDirectory(dir=job.scratch) as folder:
            began = time.perf_counter()
            start(job, train.__file__, {}, out_dir=folder, seed=seed)
            seconds = time.perf_counter() - began
            losses = read_run(folder).evals["val_loss"].tolist()
            run = job.fresh_run()
            checkpoints.restore(run, checkpoints.load(checkpoints.newest_first(Path(folder))[0]))
        row = {"final": losses[-1], "best": min(losses)} | losses_by_halves(run)
        runs[f"seed {seed}"] = row | {"seconds": seconds}
        say(f"  seed {seed}: {losses[-1]:.4f} after {seconds:.1f} s")
    kinds = {"mean": mean, "deviation": stdev, "median": median, "lowest": min, "highest": max}
    columns = dict.fromkeys(row, ".4f") | {"seconds": ".1f"}
    summary = {
        name: {column: kind(each[column] for each in runs.values()) for column in columns}
        for name, kind in kinds.items()
    }
    say("  validation loss of the last and the best evaluation, and of the last on each half of")
    say("  the split; seconds of the whole process; deviation: sample standard deviation")
    show(runs | summary, **columns)
    return {"runs": runs, **summary}


def losses_by_halves(run):
    """{"first_half": val_loss, "second_half": val_loss} over the windows that `run` evaluates."""
    middle = len(run.val_data) // 2 * train.block_size
    half = OrderedWindows(run.val_data.tokens, train.block_size, middle)
    whole = train.evaluate(run)
    first = train.evaluate(replace(run, val_data=half))
    rest = whole["val_tokens"] - first["val_tokens"]
    total, before = (each["val_loss"] * each["val_tokens"] for each in (whole, first))
    return {"first_half": first["val_loss"], "second_half": (total - before) / rest}


PARTS = {f.__name__: f for f in (peak, ladder, profile, memory, overhead, sanity, lr, exact, tries)}
PARTS["seeds"] = seeds_part  # the name `seeds` is a knob


def expected_seconds(job, parts):
    """A rough estimate, from the time of one eager step, which becomes job.step_seconds."""
    if set(parts) - {"peak", "exact", "tries"}:
        run = job.fresh_run()
        take_step = partial(train.train_step, run.model, run, *job.batch(), train.min_lr)
        take_step()
        job.step_seconds = seconds_of(take_step, 1, job.device)
    step = job.step_seconds
    timing = rounds * max(timing_seconds, step)
    start = 2 + 15 * train.compile + 20 * step
    estimates = {
        "peak": 5,
        "ladder": start + 9 * timing,
        "profile": start + 2 * timing,
        "memory": start,
        "overhead": start + 6 * timing,
        "sanity": start + 3 * timing + (100 + lr_steps) * step,
        "lr": start + lr_steps * step,
        "exact": 120 + exact_seconds,
        "tries": start + exact_seconds,
        "seeds": seeds * (10 + job.config["max_steps"] * step),
    }
    return sum(estimates[part] for part in parts)


def measure(config, argv, scratch):
    """Run the parts that --only names. Returns the exit code."""
    parts = only.split(",")
    for part in set(parts) - set(PARTS):
        fail(f"--only={only}: unknown part {part!r}; expected some of {','.join(PARTS)}")
    # what train.main does before it writes its first file
    train.check_knobs(config)
    device = devices.choose_device(train.device)
    train.deterministic = devices.set_deterministic(train.deterministic, device)
    datasets = train.open_dataset(None)
    reasons = identity.resolve_auto_knobs(vars(train), config, None, device)
    can_compile, _ = devices.choose_compile(train.compile, device, math.inf)
    peak_flops = peaks.peak_flops(device, train.dtype)
    job = Job(config, argv, device, datasets, scratch, peak_flops, can_compile)
    model = job.fresh_run().model
    job.flops_per_token = metrics.flops_per_token(model)
    flops = job.flops_per_token * train.rows_at(0) * train.block_size * train.max_steps
    train.compile, reason = devices.choose_compile(train.compile, device, flops)
    train.max_steps = 10**9  # no part ends early; decay_steps already has its value
    facts = {"date": now(), "command": sys.argv, "dataset": datasets[-1]["name"]}
    resolved = {key: getattr(train, key) for key in ("dtype", "compile", "deterministic")}
    facts |= {"config": config | resolved, **devices.fingerprint(device)}
    say(f"device   {devices.device_name(device)}, {torch.get_num_threads()} threads")
    say(f"model    {console.describe_model(model)}")
    say(f"batch    {train.batch_size} x {train.accum_steps} sequences of {facts['dataset']}")
    say(f"dtype    {train.dtype} ({reasons['dtype']})")
    say(f"compile  {train.compile} ({reason}); deterministic {train.deterministic}")
    say(f"takes    about {console.duration(expected_seconds(job, parts))} for {', '.join(parts)}")
    path = Path(train.out_dir) / "bench.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for part in parts:
            with contextlib.ExitStack() as job.stack:
                facts[part] = PARTS[part](job)
            write_json(path, facts)
    except OSError as error:
        fail(f"{path.parent} cannot be written ({error.strerror}); write --out_dir=FOLDER")
    say(f"\nall results are in {console.shown(path)}")
    no_go = not facts.get("sanity", {"go": True})["go"]
    return int(no_go or facts.get("exact", {}).get("differ", 0) > 0)


def main(argv=None):
    strict = torch.are_deterministic_algorithms_enabled()
    argv = sys.argv[1:] if argv is None else argv
    try:
        with configured(vars(train), globals(), argv=argv) as config, TemporaryDirectory() as path:
            return measure(config, argv, Path(path))
    except KeyboardInterrupt:
        print("bench.py: stopped; bench.json has the parts that finished", file=sys.stderr)
        return 130
    finally:
        torch.use_deterministic_algorithms(strict)


if __name__ == "__main__":
    sys.exit(main())
