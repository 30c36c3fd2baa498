"""What a run runs on: its device and precision, its random numbers, its ranks, the signals it gets.

A reader of the training loop never needs to open this file; train.py says when, this says how.
"""

import atexit
import contextlib
import ctypes
import datetime
import importlib.metadata
import os
import platform
import random
import re
import resource
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from configurator import fail

# Dense matrix-product peaks in FLOP/s from the makers' datasheets, without sparsity. float32 is the
# plain (not TF32) rate, since that is what torch computes by default. First match wins.
PEAKS = (
    ("H200", {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12}),
    ("H100 PCIe", {"bfloat16": 756e12, "float16": 756e12, "float32": 51e12}),
    ("H100", {"bfloat16": 989e12, "float16": 989e12, "float32": 67e12}),
    ("B200", {"bfloat16": 2250e12, "float16": 2250e12, "float32": 75e12}),
    ("A100", {"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12}),
    ("A10G", {"bfloat16": 70e12, "float16": 70e12, "float32": 35e12}),
    ("L40S", {"bfloat16": 362e12, "float16": 362e12, "float32": 91.6e12}),
    ("L4", {"bfloat16": 121e12, "float16": 121e12, "float32": 30.3e12}),
    ("RTX 4090", {"bfloat16": 165e12, "float16": 165e12, "float32": 82.6e12}),
    ("RTX 3090", {"bfloat16": 71e12, "float16": 71e12, "float32": 35.6e12}),
    ("V100", {"float16": 125e12, "float32": 15.7e12}),
    ("T4", {"float16": 65e12, "float32": 8.1e12}),
)


# ---- device and precision ------------------------------------------------------------------------


def choose_device(name):
    """The torch.device of this rank for --device=name; exits where it is not there."""
    chosen = name
    if name == "auto":
        found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        chosen = next((kind for kind in found if found[kind]), "cpu")
    if chosen == "cuda" and "LOCAL_RANK" in os.environ:
        chosen = f"cuda:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.device(chosen)
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = (str(error).splitlines() or ["it is not there"])[0]
        fail(f"--device={name}: {why}; --device=auto takes what is there")
    if device.type == "cpu":
        keep_freed_memory()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def choose_dtype(name, device):
    """(dtype's name, why) for --dtype=name: auto is what this hardware really computes in."""
    _, flags = cpu_info()
    native, why = "float32", "nothing smaller is native here"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        native = "bfloat16" if major >= 8 else "float16"
        why = f"compute capability {major}.{minor}"
    elif device.type == "cpu":
        for flag in ("avx512_bf16", "amx_bf16"):
            if flag in flags:
                native, why = "bfloat16", f"this CPU has {flag}"
    if name == "float16" and device.type == "cpu" and "avx512_fp16" not in flags:
        fail("--dtype=float16: this CPU does not compute in it (no avx512_fp16); try --dtype=auto")
    if name == "float16" and device.type == "mps":
        fail("--dtype=float16: there is no GradScaler for mps; try --dtype=auto")
    return (native, why) if name == "auto" else (name, "as told")


def choose_compile(setting, device, seconds):
    """(whether, why) for --compile=setting; seconds: how long the run takes at the device's peak.

    Compiling costs some seconds once, so it needs a compiler, and a run that pays them back.
    """
    if setting != "auto":
        return setting, "as told"
    if device.type == "cuda":
        there = torch.utils._triton.has_triton()
        return there, "Triton is here" if there else "no Triton here"
    if device.type != "cpu" or not shutil.which(os.environ.get("CXX", "g++")):
        return False, "no C++ compiler here"
    return seconds > 60, f"{seconds:.0f} s of work at peak; worth it from 60"


def keep_freed_memory():
    """Have malloc keep what is freed for the next step.

    A step on the CPU frees and takes the same large blocks again and again. glibc gives each back to
    the system by default, and the page faults that follow cost a fifth of a step or more. What is
    kept is what the peak needed anyway. Elsewhere than on Linux with glibc, nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no block is a mapping of its own
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: the heap never shrinks
        libc.mallopt(-2, 64 * 2**20)  # M_TOP_PAD: and grows by 64 MiB at a time


def cpu_info():
    """(model name, set of instruction flags) of this CPU; Linux tells the flags, others may not."""
    try:
        fields = dict(
            map(str.strip, line.split(":", 1))
            for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
            if ":" in line
        )
        return fields.get("model name", platform.machine()), set(fields.get("flags", "").split())
    except OSError:
        return platform.processor() or platform.machine(), set()


def device_name(device):
    """What the device calls itself: 'NVIDIA H200', 'Intel(R) Xeon(R) Processor', 'Apple mps'."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_info()[0] if device.type == "cpu" else f"{platform.processor()} {device.type}"


def matmul_rate(device, dtype, size):
    """FLOP/s of a size-cubed matrix product here: the best of 20 timings, or of as many as half a
    second holds. The best, because whatever disturbs a timing makes it longer."""
    a = torch.ones(size, size, device=device, dtype=dtype)
    out, times = torch.empty_like(a), []
    while len(times) < 3 or len(times) < 20 and sum(times) < 0.5:
        start = time.perf_counter()
        torch.mm(a, a, out=out)
        out[0, 0].item()  # waits for the device
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


def peak_flops(device, dtype):
    """(FLOP/s, where the figure is from) for MFU: the datasheet's, or else a measured product's."""
    name = device_name(device)
    for key, peaks in PEAKS:
        if device.type == "cuda" and key in name and dtype in peaks:
            return peaks[dtype], f"datasheet of the {key}"
    size = 2048 if dtype != "float32" or device.type != "cpu" else 1024
    try:
        rate = matmul_rate(device, getattr(torch, dtype), size)
    except RuntimeError:
        return None, "unknown: this device would not multiply two matrices"
    return rate, f"measured, {size}-cubed matrix product"


def memory_gb(device):
    """Peak memory in 1e9 bytes: the allocator's on a GPU, the process's resident set elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def out_of_memory(error):
    """Is it that? A GPU has a type for it, the allocators of the CPU and of MPS have only words."""
    words = ("can't allocate memory", "out of memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and any(each in str(error) for each in words)
    )


def explain(error):
    """What an error in mid-run means, where it is not the program's fault: one line, or None."""
    last_line = (str(error).strip().splitlines() or [""])[-1]
    go_on = "the same command goes on from the newest checkpoint"
    why = None
    if out_of_memory(error):
        why = "out of memory outside the forward and backward pass; what helps: a smaller --n_embd"
    elif isinstance(error, OSError) or "DataLoader worker (pid" in last_line:
        why = f"{last_line}; with that in order, {go_on}"
    elif dist.is_initialized() and ("gloo" in str(error) or "NCCL" in str(error)):
        detail = last_line.rpartition("] ")[2].partition(". ")[0]
        why = f"another rank is gone ({detail}); {go_on}"
        if re.search("timed out|timeout", str(error), re.IGNORECASE):
            names = " and ".join(map(str, stragglers())) or "unknown"
            why = f"rank {names} kept the others waiting for more than hang_minutes; {go_on}"
    if why and rank() > 0:  # rank 0 says it at the end of the run
        print(f"rank {rank()}: failed: {why}", file=sys.stderr, flush=True)
    return why


def gpu_util(device):
    """Utilisation of the GPU in percent, from NVML; None where there is none to ask."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device)
    except Exception:  # no pynvml, no driver, a GPU of another maker: the number is unknown
        return None


def fingerprint(device):
    """Everything about software and hardware that could explain a difference between two runs."""
    cpu, flags = cpu_info()
    cuda = device.type == "cuda"
    driver = None
    if cuda:
        try:
            import pynvml

            pynvml.nvmlInit()
            driver = pynvml.nvmlSystemGetDriverVersion()
        except Exception:  # the driver's version is nice to have, never a reason to stop
            pass
    packages = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    return {
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version() if cuda else None,
            "packages": dict(sorted((n, v) for n, v in packages.items() if n)),
        },
        "hardware": {
            "platform": platform.platform(),
            "cpu": cpu,
            "instruction_set": torch.backends.cpu.get_cpu_capability(),
            "amx": "amx_bf16" in flags,
            "threads": torch.get_num_threads(),
            "device": device_name(device),
            "gpu_count": torch.cuda.device_count() if cuda else 0,
            "world_size": world_size(),
            "driver": driver,
        },
    }


# ---- random numbers ------------------------------------------------------------------------------


def seed_everything(seed):
    """Python, NumPy, torch and every device that torch knows."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def torch_rng_state(device):
    """What the next random number of torch depends on: on the CPU, and on the device."""
    on_device = getattr(torch.get_device_module(device), "get_rng_state", None)
    return {
        "torch": torch.get_rng_state(),
        "device": on_device() if on_device and device.type != "cpu" else None,
    }


def set_torch_rng_state(rng, device):
    torch.set_rng_state(rng["torch"])
    if rng["device"] is not None and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(rng["device"])


def rng_state(device):
    """What every next random number depends on, as torch.load(weights_only=True) can read it."""
    name, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), *rest],
        **torch_rng_state(device),
    }


def set_rng_state(rng, device):
    random.setstate(rng["python"])
    name, keys, *rest = rng["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    set_torch_rng_state(rng, device)


# ---- ranks ---------------------------------------------------------------------------------------


def join_ranks(hang_minutes):
    """One process for each device where torchrun started several; else nothing.

    hang_minutes: after which a rank that waits for another one gives up, and names it.
    """
    if "WORLD_SIZE" in os.environ:
        one_node = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
        shared_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        if shared_store and restarts and not one_node:
            fail(
                "--max-restarts on several nodes: new ranks would look for dead ones; write, on each "
                "node, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --rdzv-backend=c10d ..."
            )
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        store, number, count = next(dist.rendezvous("env://"))
        if shared_store and one_node:
            # torchrun's store outlives --max-restarts; without a name for each try, new ranks would
            # find the addresses of dead ones in it. On several nodes no name helps: each agent counts
            # its own tries, and keeps the address of the first store (torch 2.13, pytorch#135712).
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(f"attempt_{attempt}", store)
        timeout = datetime.timedelta(minutes=hang_minutes)
        dist.init_process_group(
            backend, timeout=timeout, world_size=count, rank=number, store=store
        )
        progress["store"] = store
        publish_progress(number, min(5.0, 6 * hang_minutes))


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def say(*words):
    """One log for all ranks."""
    if rank() == 0:
        print(*words, flush=True)


progress = {"collectives": 0, "store": None}  # begun by this rank so far: a straggler has fewer


def publish_progress(number, seconds):
    """Tell the store how many collectives this rank began, every so many seconds, from a thread."""
    leaving = threading.Event()

    def publish():
        while True:
            with contextlib.suppress(RuntimeError):  # the store has gone, and the run will soon
                progress["store"].set(f"collectives_{number}", str(progress["collectives"]))
            if leaving.wait(seconds):
                return

    thread = threading.Thread(target=publish, daemon=True)
    thread.start()
    atexit.register(lambda: (leaving.set(), thread.join()))


def stragglers():
    """The ranks that began fewer collectives than this one, by what the store knows of them."""
    keys = [f"collectives_{number}" for number in range(world_size())]
    try:
        met = [int(progress["store"].get(key)) for key in keys if progress["store"].check([key])]
    except RuntimeError:  # the store has gone too
        return []
    return [number for number, count in enumerate(met) if count < progress["collectives"]]


def sum_over_ranks(tensors):
    """Sum each tensor over the ranks, in place, in one message.

    One flat buffer in a fixed order keeps a resumed run bit-exact at any number of ranks, which
    DDP's buckets, rebuilt after its first step, do not from three ranks on.
    """
    if dist.is_initialized():
        progress["collectives"] += 1
        flat = torch.cat([t.flatten() for t in tensors])
        dist.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))


def agree(*flags):
    """The largest of each flag over all ranks. Travels on the CPU: the device is never waited for."""
    if dist.is_initialized():
        progress["collectives"] += 1
        flags = torch.tensor(flags)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        flags = flags.tolist()
    return flags


def from_rank0(function, *args):
    """What function(*args) returns on rank 0, on every rank; or its exit, on every rank."""
    result = None
    if rank() == 0:
        try:
            result = function(*args)
        except SystemExit as leaving:
            result = leaving
    if dist.is_initialized():
        progress["collectives"] += 1
        box = [result]
        dist.broadcast_object_list(box)
        result = box[0]
    if isinstance(result, SystemExit):
        raise result
    return result


def from_all_ranks(value):
    """[value of rank 0, value of rank 1, ...], on every rank."""
    values = [value] * world_size()
    if dist.is_initialized():
        progress["collectives"] += 1
        dist.all_gather_object(values, value)
    return values


# ---- sharding ------------------------------------------------------------------------------------


def shard(model, device, dtype, offload):
    """`model`, a GPT on the CPU, with each weight spread over the ranks in rows (FSDP2).

    A block's weights are gathered just before it computes and let go right after, in the forward and
    again in the backward pass, where its gradients are summed and spread alike. offload: weights,
    gradients and moments stay in the host's memory, and the optimizer works there.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    how = {"mesh": init_device_mesh(device.type, (world_size(),)), "reshard_after_forward": True}
    if offload:
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    # matrices travel in the precision in which autocast would use them; gradients add up in float32
    low = None if dtype == "float32" else getattr(torch, dtype)
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, **how)
    fully_shard(model, **how)
    for module in (*model.blocks, model):
        module.set_gradient_divide_factor(1.0)  # a sum, as sum_over_ranks takes it
        module.set_force_sum_reduction_for_comms(True)
    return model


def local(tensor):
    """This rank's share of a sharded tensor, in place; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor):
    """All of a sharded tensor; any other as it is. All ranks call it together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def shard_like(weight, value):
    """`value`, which every rank has whole, sharded as `weight` is, if it has the shape of one."""
    if not hasattr(weight, "to_local") or value.shape != weight.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    value = value.to(weight.device, weight.dtype)
    return distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None)


# ---- signals -------------------------------------------------------------------------------------


class Signals:
    """What the outside has asked for. It is read at the end of each step.

    stop: the number of the SIGINT or SIGTERM that came, or 0; a second Ctrl-C ends the process at
    once. save: 1 after a SIGUSR1.
    """

    def __init__(self):
        self.stop, self.save, self.interrupts, self.parent = 0, 0, 0, os.getppid()
        signal.signal(signal.SIGINT, self.on_stop)
        signal.signal(signal.SIGTERM, self.on_stop)
        signal.signal(signal.SIGUSR1, self.on_save)

    def on_stop(self, number, frame):
        self.interrupts += number == signal.SIGINT
        if self.interrupts > 1:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.stop = self.stop or int(number)

    def on_save(self, number, frame):
        self.save = 1

    def take_save(self):
        """`save`, once: what comes later asks for another checkpoint."""
        asked, self.save = self.save, 0
        return asked

    def orphaned(self):
        """Has torchrun died? Its ranks sit in sessions of their own, and would live on."""
        return dist.is_initialized() and os.getppid() != self.parent


def ignore_signals(worker):
    """A scheduler signals the whole process group; the training process decides when workers end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def stop_workers(batches):
    """End the workers of a DataLoader's iterator. Python, at its exit, would end them by the SIGTERM
    that they ignore, and wait for ever, wherever an error still holds on to the iterator."""
    if hasattr(batches, "_shutdown_workers"):
        batches._shutdown_workers()
