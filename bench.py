"""Where time and memory go: measures the step, data and model that train.py itself runs.

    python bench.py config/shakespeare.py
    python bench.py config/shakespeare.py --n_layer=6 --n_embd=384 --only=ladder,profile
    python bench.py --script=examples/images.py --only=memory    # a fork; also as a plain word

Takes train.py's flags and those below. Writes the results to bench.json in out_dir (after Ctrl-C
those of the parts that finished); a run that lies there is not touched. Run nothing else meanwhile.
"""

import plumbing  # noqa: F401  first: Ctrl-C in the imports is one line

# isort: split
import contextlib
import itertools
import math
import os
import shlex
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import torch
from torch.autograd import DeviceType
from torch.profiler import record_function

import plain
import train
from checks import processes
from plumbing import cli, code, compiler, console, data, forks, machine, weights
from plumbing.cli import configured, fail, folder_name, run_script
from plumbing.console import REPO, print0
from plumbing.files import write_json
from plumbing.run_folder import RunFolder, now
from plumbing.snapshot import tensors

# The measurement
only = "peak,ladder,profile,memory,overhead"  # parts to run, in this order
rounds = 5  # timings of each candidate, interleaved; the median counts, [1, inf)
timing_seconds = 0.5  # approximate length of one timing, (0, inf)
trace = False  # write trace.json from the profile part, for https://ui.perfetto.dev
script = ""  # a fork that imports train, replaces some of it and calls train.main(); "" = train.py

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # at level 5 the profiler prints "USDT:" lines


# ---- the run that is measured --------------------------------------------------------------------


@dataclass(eq=False)
class Job:
    """What every part measures: the run that the flags describe."""

    run: train.Run  # as train.build() made it; its folder is empty, and for the runs made here
    config: dict  # every knob, before "auto" is resolved
    argv: list  # flags and config files as typed, for subprocesses
    script: str  # train.py, or the script that changes it
    folder: Path  # out_dir, which may hold a real run
    device: torch.device
    meta: dict  # of the dataset
    peak: tuple  # (FLOP/s or None, source of the figure)

    def fresh_run(self, datasets=None):
        """A new run by the current values of train.py's knobs, on the data of the job's run, unless
        others are given; with the weights of --init_from."""
        start = SimpleNamespace(device=self.device, folder=self.run.folder, path=None, reasons={})
        datasets = datasets or (self.run.train_data, self.run.val_data, self.run.facts["data"])
        with configured(vars(train), argv=[]) as config:
            run = train.build_run(config, start, datasets)
        if train.init_from:
            weights.begin_from(run, train.init_from, None)
        return run

    def batch(self):
        reader = data.Reader(self.run.train_data, train.seed)
        return data.to_device(reader[0, train.sequences_at(0)], self.device)

    def ready_run(self):
        """(a new run with its batches, the model with which train.py trains it, compiled or not)"""
        run = self.fresh_run()
        model = compiler.warm_up(run, train.compile, train.forward_backward, self.batch)
        run.batches = train.load_batches(run)
        return run, model


# setting(name=value): sets globals of train.py in a block, or in a function that it decorates
setting = partial(cli.setting, vars(train))


# ---- timings and tables --------------------------------------------------------------------------


def seconds_of(step, count, device):
    """Mean seconds per call of step()."""
    machine.synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    machine.synchronize(device)
    return (time.perf_counter() - start) / count


def medians(steps, device):
    """{name: median seconds per call} of {name: function}, timed in turn: A B C A B C ..."""
    counts = {}
    for name, step in steps.items():
        step()  # warms up
        counts[name] = max(1, round(timing_seconds / seconds_of(step, 1, device)))
    times = {name: [] for name in steps}
    for name in list(steps) * rounds:
        times[name].append(seconds_of(steps[name], counts[name], device))
    return {name: median(times[name]) for name in times}


def print_table(rows, **formats):
    """Print {name: {column: value}} as a table with a column per format; ".1f M" is in millions."""
    names = ["", *rows]
    columns = [[name.ljust(max(map(len, names))) for name in names]]
    for key, how in formats.items():
        cells = [key.replace("_", " "), *(cell(row.get(key, ""), how) for row in rows.values())]
        columns.append([each.rjust(max(map(len, cells))) for each in cells])
    for line in zip(*columns, strict=True):
        print0(" ", "  ".join(line))


def cell(value, how):
    if isinstance(value, str):
        return value
    if value is None or not math.isfinite(value):
        return "n/a"
    how, _, unit = how.partition(" ")
    return format(value / {"": 1, "M": 1e6, "G": 1e9, "T": 1e12}[unit], how)


# ---- time ----------------------------------------------------------------------------------------


def peak(job):
    """The fastest matrix product of each dtype, beside the datasheet's, and memory bandwidth."""
    device = job.device
    rows = {}
    for dtype in ("float32", "bfloat16", "float16"):
        row = {"datasheet": machine.datasheet_peak(machine.device_name(device), dtype)}
        with contextlib.suppress(RuntimeError):  # a dtype that this device does not support
            row["measured"], row["n"] = machine.matmul_rate(device, getattr(torch, dtype))
        rows[dtype] = row
    source = torch.ones(2**26 if device.type == "cpu" else 2**28, device=device)
    bandwidth = 2 * source.nbytes / min(seconds_of(source.clone, 1, device) for _ in range(6))
    print0(f"\npeak: TFLOP/s of an n-cubed matrix product, {torch.get_num_threads()} threads")
    print_table(rows, measured=".2f T", n=",.0f", datasheet="g T")
    print0(
        f"  memory: {bandwidth / 1e9:.1f} GB/s, reads plus writes, copying {source.nbytes:,} bytes"
    )
    return {"flops_per_sec": rows, "bytes_per_sec": bandwidth}


def ladder(job):
    """What each technique gains on top of those before it; the last rung is what deterministic mode
    costs. A technique that the run does not have is left out. All rungs share one model. The first
    has an optimizer that is not fused, so the host waits: only then does it know whether to skip.
    MFU is relative to the peak of train.dtype on all rungs."""
    may_compile, _ = machine.choose_compile(job.config["compile"], job.device, math.inf, 10**9)
    with setting(compile=may_compile, num_workers=0):
        run, model = job.ready_run()
    torch._logging.set_logs(recompiles=False)  # the last rung compiles once more
    workers = train.num_workers or 2
    with setting(num_workers=workers):
        run_ahead = replace(run, batches=train.load_batches(run))
    knobs = train.peak_lr, train.weight_decay, train.beta1, train.beta2, train.momentum
    not_fused = train.configure_optimizers(run.model, train.optimizer, *knobs, "none")
    slow_run = replace(run, optimizers=not_fused)
    in_float32 = setting(dtype="float32")
    rungs = {
        "float32, eager, waits for the host": in_float32(stepper(slow_run, run.model)),
        "fused optimizer, no wait": in_float32(stepper(run, run.model)),
    }
    if train.dtype != "float32":
        rungs[f"autocast {train.dtype}"] = stepper(run, run.model)
    if model is not run.model:
        rungs["compile"] = stepper(run, model)
    rungs[f"{workers} workers"] = last = stepper(run_ahead, model)
    if train.deterministic:
        rungs["not deterministic"] = not_deterministic(last)
    seconds = medians(rungs, job.device)
    tokens = train.sequences_at(0) * train.block_size
    first = before = next(iter(seconds.values()))
    result = {}
    for name, spent in seconds.items():
        rate = tokens / spent
        flops = train.flops_per_token(run.model) * rate
        result[name] = {
            "ms": 1000 * spent,
            "tokens_per_sec": rate,
            "tflops": flops / 1e12,
            "mfu": flops / job.peak[0] if flops <= job.peak[0] else math.nan,
            "to_before": before / spent,
            "to_first": first / spent,
        }
        before = spent
    print0(f"\nladder: each technique on top of those before; medians of {rounds}, interleaved")
    print_table(
        result,
        ms=".2f",
        tokens_per_sec=",.0f",
        tflops=".3g",
        mfu=".1%",
        to_before=".2f",
        to_first=".2f",
    )
    return {"rungs": result}


def stepper(run, model):
    """A function that takes the next step of `run`, as the loop of train.train does."""
    return partial(train.take_step, run, model, is_witness=True)


def not_deterministic(step):
    """`step`, a function, with torch's deterministic mode off while it runs."""

    def without():
        torch.use_deterministic_algorithms(False)
        step()
        torch.use_deterministic_algorithms(True)

    return without


def profile(job):
    """Where the time of a step goes, from torch.profiler, and its ten most expensive operations.

    CPU: time of the host by region, as shares of a profiled step, which takes `slowdown` times as
    long. CUDA: time of the kernels that a region launched, as shares of an unprofiled step; the
    rest is idle. "optimizer" is train_step without forward and backward."""
    run, model = job.ready_run()
    seconds = medians({"": stepper(run, model)}, job.device)[""]
    count = max(3, min(50, round(timing_seconds / seconds)))
    run.batches = iter(record_function("data")(partial(next, run.batches)), None)
    step = stepper(run, record_function("forward")(model))
    train_step = record_function("train_step")(train.train_step)
    with torch.profiler.profile() as profiler, setting(train_step=train_step):
        profiled = seconds_of(step, count, job.device)
    if trace:
        profiler.export_chrome_trace(str(job.folder / "trace.json"))
    averages = profiler.key_averages()
    on_gpu = job.device.type == "cuda"
    kind, whole = ("device", seconds) if on_gpu else ("cpu", profiled)
    spent = dict.fromkeys(("forward", "backward", "optimizer", "data", "train_step"), 0.0)
    for average in averages:
        is_backward = average.key.startswith("autograd::engine::evaluate_function")
        name = "backward" if is_backward else average.key
        if name in spent and average.device_type == DeviceType.CPU:
            spent[name] += getattr(average, f"{kind}_time_total") / 1e6 / count
    # on a GPU autograd launches the backward pass in a thread of its own, outside train_step
    within = spent["forward"] + (0 if on_gpu else spent["backward"])
    spent["optimizer"] = spent.pop("train_step") - within
    shares = {name: time / whole for name, time in spent.items()}
    shares["idle"] = 1 - sum(shares.values())
    ms = 1000 * seconds
    slowdown = profiled / seconds
    print0(f"\nprofile: {ms:.2f} ms a step; under the profiler {slowdown:.2f} times that")
    rows = {name: {"ms": share * ms, "share": share} for name, share in shares.items()}
    print_table(rows, ms=".2f", share=".1%")
    print0(averages.table(f"self_{kind}_time_total", row_limit=10, max_name_column_width=40))
    return {"step_ms": ms, "slowdown": slowdown, "shares": shares}


# ---- the overhead of the loop --------------------------------------------------------------------


def overhead(job):
    """What train.py's promises cost: whole runs of the same steps by train.py and by plain.py, in
    turn, each with its start and an evaluation before and after."""
    if job.script != train.__file__:
        print0("\noverhead: n/a, plain.py is train.py's loop, not that of a fork")
        return {}
    run, model = job.ready_run()
    inputs, targets, _ = next(run.batches)
    step = partial(train.train_step, model, run, inputs, targets, train.peak_lr)
    steps = max(2, round(20 * timing_seconds / seconds_of(step, 2, job.device)))
    knobs = {name: value for name, value in run.facts["config"].items() if name in vars(plain)}
    knobs |= {"max_steps": steps, "eval_interval": 0, "log_interval": 10, "schedule": "linear"}
    knobs["device"] = job.device.type
    times = {"plain.py": [], "train.py": []}
    with TemporaryDirectory() as folder:
        Path(folder, "data").symlink_to(Path(job.config["data_dir"]).resolve())
        for name in list(times) * rounds:
            began = time.perf_counter()
            words = [f"--{key}={value}" for key, value in knobs.items()]
            words += ["--resume=restart", "--report=false"] if name == "train.py" else []
            processes.output_of([REPO / name, *words], cwd=folder)
            times[name].append(time.perf_counter() - began)
    rows = {name: {"seconds": median(each)} for name, each in times.items()}
    over_plain = rows["train.py"]["seconds"] / rows["plain.py"]["seconds"] - 1
    rows["train.py"]["over_plain"] = over_plain
    print0(f"\noverhead: whole runs of {steps} steps, medians of {rounds}, in turn")
    print_table(rows, seconds=".2f", over_plain="+.2%")
    return {"steps": steps, "times": times, "over_plain": over_plain}


# ---- memory --------------------------------------------------------------------------------------


def memory(job):
    """Tensor memory of an eager step, measured at a micro-batch and at half of it. What passes
    within a step grows with the sequences in it, so the line through both says what twice as many
    need, and how many fit."""
    free = machine.free_memory(job.device)  # None if the system does not say
    rows = {}
    for name in ("without grad_checkpoint", "with grad_checkpoint"):
        with setting(grad_checkpoint=name.startswith("with ")):
            row = measured_memory(job, max(2, train.batch_size))
            size = row["micro_batch"]
            half = measured_memory(job, max(1, size // 2))
        a_sequence = (row["measured"] - half["measured"]) / max(1, size - half["micro_batch"])
        row["twice"] = row["measured"] + size * a_sequence
        if free and a_sequence > 0:
            row["fits"] = size + (0.9 * free - row["measured"]) // a_sequence
        rows[name] = row
    print0(
        "\nmemory: MB of tensors at the peak of an eager step\n"
        "  passing: activations, gradients and what else lives only within a step; twice: predicted\n"
        "  for twice the micro-batch, by a line through this and half of it; fits: the largest\n"
        f"  micro-batch in 90% of {cell(free, '.1f G')} GB free"
    )
    columns = dict.fromkeys(("weights", "moments", "passing", "measured", "twice"), ",.1f M")
    print_table(rows, micro_batch=",.0f", **columns, fits=",.0f")
    return {"here": rows, "available": free}


def measured_memory(job, size):
    """{kind: bytes} of an eager step on micro-batches of `size` sequences, or of as many as fit, its
    `micro_batch`. `measured` is the peak: what stays after a step, plus the most that it adds."""
    with setting(batch_size=size, accum_steps=min(train.accum_steps, 2)):  # 2: gradients are there
        run = job.fresh_run()
        take_step = partial(train.train_step, run.model, run, *job.batch(), train.min_lr)
        take_step()  # creates the moments, and what libraries allocate once
    run.model.zero_grad(set_to_none=True)
    for optimizer in run.optimizers:
        optimizer.found_inf = None  # or the profiler complains of a tensor that it has not seen
    passing = most_allocated(take_step, job.device)
    weights = nbytes([*run.model.parameters(), *run.model.buffers(), run.ema])
    moments = nbytes(optimizer.state_dict() for optimizer in run.optimizers)
    return {
        "micro_batch": run.state["micro_batch"],
        "weights": weights,
        "moments": moments,
        "passing": passing,
        "measured": weights + moments + passing,
    }


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


def nbytes(values):
    return sum(tensor.nbytes for tensor in tensors(list(values)))


PARTS = {f.__name__: f for f in (peak, ladder, profile, memory, overhead)}


# ---- which parts ---------------------------------------------------------------------------------


@contextlib.contextmanager
def job_of(words, script, *scopes):
    """A context with the Job that the flags `words` describe. scopes: more globals with knobs."""
    strict = torch.are_deterministic_algorithms_enabled()
    scopes = vars(train), globals(), *scopes
    try:
        with configured(*scopes, argv=words) as config, TemporaryDirectory() as scratch:
            with train.build([f"--out_dir={scratch}", "--resume=auto"]) as run:
                name = folder_name(config, code.script())
                if config.get("against"):
                    name += named(config, words)
                with setting(max_steps=10**9):  # no part ends early; decay_steps has its value
                    yield Job(
                        run,
                        config,
                        words,
                        script,
                        Path(name),
                        run.device,
                        run.facts["data"]["meta"],
                        machine.peak_flops(run.device, train.dtype),
                    )
    finally:
        torch.use_deterministic_algorithms(strict)


def named(config, words):
    """The end of a folder's name: the words of --against that `words` lack."""
    known = {word.removeprefix("--script=") for word in words}
    others = [word for word in shlex.split(config["against"]) if word not in known]
    return "".join(f",{os.path.basename(word).removeprefix('--')}" for word in others) + ",against"


def measure(own, argv):
    """Run the parts that --only names. own: globals() of the script, with its PARTS. Returns what
    its JSON file holds: {part: result}, and facts."""
    path, words = forks.script_among(sys.argv[1:] if argv is None else argv)
    if path and forks.load(path, train) is not train:
        fail(f"--script={path}: it is a copy of train.py; expected a script that imports train")
    with job_of(words, path or train.__file__, own) as job:
        parts = own["only"].split(",")
        for part in set(parts) - set(own["PARTS"]):
            fail(f"--only={own['only']}: no part {part!r}; there are {', '.join(own['PARTS'])}")
        path = job.folder / f"{Path(own['__file__']).stem}.json"
        resolved = {name: vars(train)[name] for name in ("dtype", "compile", "deterministic")}
        facts = {
            "date": now(),
            "command": sys.argv,
            "git": code.git_state()[0],
            "dataset": job.run.facts["data"]["name"],
            "config": job.config | resolved,
            **machine.describe_machine(job.device),
        }
        with RunFolder(job.folder).refusing():
            job.folder.mkdir(parents=True, exist_ok=True)
            write_json(path, facts)
        console.print_plan(job.run, job.peak, changed={})
        print0(f"results  {console.shown(path)}: {', '.join(parts)}")
        for part in parts:
            facts[part] = own["PARTS"][part](job)
            write_json(path, facts)
        return facts


def main(argv=None):
    measure(globals(), argv)


if __name__ == "__main__":
    sys.exit(run_script(main))
