"""The hardware: choose device, precision and compilation by its properties; its peak; describe it.
Nothing here initializes CUDA unless the device is a GPU."""

import atexit
import contextlib
import ctypes
import gc
import math
import os
import platform
import re
import sys
import timeit
from pathlib import Path
from statistics import median

import numpy as np
import torch

from plumbing.cli import fail, show
from plumbing.ranks import world_size

# here: cuBLAS reads it once, at its first product
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

WORTH_COMPILING = 5e13  # FLOPs of a run on a CPU from which compiling saves more time than it takes
STEPS_WORTH_COMPILING = 1000  # of a run on a GPU, where compiling takes most of a minute

# Peak FLOP/s of dense matrix products from the makers' datasheets: in 16 bits, in float32 (not
# TF32). Names are complete, without "NVIDIA ": if a part sufficed, an RTX A1000 would get the peak
# of an A100, and a MIG slice that of the whole GPU. Other devices are measured.
PEAKS = {
    "B200": (2250e12, 75e12),
    "H200": (989e12, 67e12),
    "H100 80GB HBM3": (989e12, 67e12),
    "H100 PCIe": (756e12, 51e12),
    "A100-SXM4-40GB": (312e12, 19.5e12),
    "A100-SXM4-80GB": (312e12, 19.5e12),
    "A100-PCIE-40GB": (312e12, 19.5e12),
    "A100 80GB PCIe": (312e12, 19.5e12),
    "A10G": (70e12, 35e12),
    "L40S": (362e12, 91.6e12),
    "L4": (121e12, 30.3e12),
    "GeForce RTX 4090": (165e12, 82.6e12),
    "GeForce RTX 3090": (71e12, 35.6e12),
    "Tesla V100-SXM2-16GB": (125e12, 15.7e12),
    "Tesla V100-SXM2-32GB": (125e12, 15.7e12),
    "Tesla T4": (65e12, 8.1e12),
}

SIZES = (256, 512, 1024, 2048, 4096, 8192)  # of the matrices, where the peak is measured

# --deterministic=portable: only what all x86-64 CPUs with AVX2 have, and compute alike
PORTABLE_KERNELS = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "COMPATIBLE",  # for MKL, AVX2 is not the same on Intel and AMD
}
PORTABLE_KNOBS = {"device": "cpu", "dtype": "float32", "compile": False}


# ---- choices by properties of the hardware -------------------------------------------------------


def choose_device(name: str) -> torch.device:
    """The torch.device of this rank for --device=name. Raises BadInput if it is not available."""
    kind = name
    if name == "auto":
        kind = str(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    if kind == "cuda":
        kind = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        device = torch.device(kind)
    except RuntimeError:  # it lists devices that no loop has run on
        fail(f"--device={name}: expected auto, cpu, cuda, cuda:1 or mps")
    try:
        if device.type == "cuda":
            torch.cuda.init()  # says what is missing
            torch.cuda.set_device(device)  # else the tensor below would also occupy GPU 0
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0]
        fail(f"--device={name}: {why}; --device=auto takes what is available")
    if device.type == "cpu":
        keep_freed_memory()
    return device


def choose_dtype(name: str, device: torch.device) -> tuple[str, str]:
    """(dtype's name, why) for --dtype=name. auto: 16 bits if the hardware computes in them."""
    if name != "auto":
        return name, "as given"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return "bfloat16" if major >= 8 else "float16", f"compute capability {major}.{minor}"
    if device.type == "mps":
        return "bfloat16", "macOS 14 or newer"  # torch runs on no older one
    native = cpu_info()[1] & {"amx_bf16", "avx512_bf16"}
    if device.type == "cpu" and native:
        return "bfloat16", f"this CPU has {min(native)}"
    return "float32", "nothing smaller is native here"


def choose_compile(
    setting: bool | str, device: torch.device, flops: float, steps: int
) -> tuple[bool, str]:
    """(whether to compile, why) for --compile=setting. flops (may be NaN), steps: of the whole
    run. Where a compiler is missing, the warm-up pass notices, and the run goes on without."""
    if setting != "auto":
        return setting, "as given"
    if device.type == "cuda":
        return steps >= STEPS_WORTH_COMPILING, f"worth it from {STEPS_WORTH_COMPILING:,} steps"
    if math.isnan(flops):
        return False, "the model has no flops_per_token(); --compile=true compiles it"
    is_worth_it = device.type == "cpu" and flops >= WORTH_COMPILING
    return is_worth_it, f"{flops:.1e} FLOPs; on a CPU worth it from {WORTH_COMPILING:.0e}"


def pin_kernels(config: dict) -> dict:
    """For --deterministic=portable, make this process compute in float32, eager, on one thread, with
    PORTABLE_KERNELS, until it ends. Else do nothing.

    config: the knobs of train.py. Returns those that the mode sets. Call it before the first
    operation: each library chooses its kernels once. Raises BadInput if a knob contradicts the
    mode, or if the kernels did not take hold. `check.py --only=portable` compares their bits."""
    if config["deterministic"] != "portable":
        return {}
    for name, value in PORTABLE_KNOBS.items():
        if config[name] not in ("auto", value):
            fail(
                f"--deterministic=portable: expected --{name}={show(value)}, "
                f"found --{name}={show(config[name])}"
            )
    os.environ.update(PORTABLE_KERNELS)
    torch.set_num_threads(1)  # MKL divides some sums by the number of threads
    found = torch.backends.cpu.get_cpu_capability()
    if found != "AVX2":
        fail(
            f"--deterministic=portable: expected AVX2 kernels, found {found}: it needs an x86-64 CPU "
            "with AVX2, and a process in which torch has computed nothing before train.main"
        )
    return PORTABLE_KNOBS


def set_deterministic(setting: bool | str, device: torch.device) -> bool | str:
    """Set deterministic mode for --deterministic=setting. auto: on, except on MPS. Returns the
    setting, never auto. Call it before the process group is built and before the first matrix
    product."""
    deterministic = device.type != "mps" if setting == "auto" else setting
    if deterministic and device.type == "cuda":
        os.environ.setdefault("NCCL_ALGO", "Ring")  # NVLS adds in any order (nccl#1497)
    # Like torch.use_deterministic_algorithms(), but without importing Inductor, which takes most of
    # a second: if a model is compiled, compiler.compiled() sets Inductor's option.
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
    torch.utils.deterministic.fill_uninitialized_memory = False  # it costs time and hides nothing
    return deterministic


# ---- memory, copies, utilization -----------------------------------------------------------------


def keep_freed_memory(keep: bool = True) -> None:
    """Make glibc's malloc keep freed memory for the next step, which allocates the same large
    blocks again: returned to the system, they cost page faults, a fifth of a step or more.
    keep=False: large blocks that are allocated from here on are returned when they are freed."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0 if keep else 65536)  # M_MMAP_MAX: how many get a mapping of their own
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: shrink only if 2 GiB at its end are free
        libc.mallopt(-2, 64 * 2**20)  # M_TOP_PAD: grow by 64 MiB more than is needed


def synchronize(device: torch.device) -> None:
    torch.get_device_module(device).synchronize()


def gpu_util(device: torch.device) -> float | None:
    """Utilization of the GPU in percent, from NVML; None if it is not available."""
    with contextlib.suppress(Exception):  # no pynvml, no driver, a GPU of another maker
        return torch.cuda.utilization(device) if device.type == "cuda" else None


def memory_gb(device: torch.device) -> float | None:
    """Memory in 1e9 bytes: the peak of CUDA's allocator since reset_peak_memory(), else what this
    process has at present, without the pages of files, such as the data, that it has mapped. None
    if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    used = bytes_in("/proc/self/status", "RssAnon")
    return used and used / 1e9


def reset_peak_memory(device: torch.device) -> None:
    """So that the memory of an evaluation or the warm-up pass does not count as that of training."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def free_memory(device: torch.device) -> int | None:
    """Bytes free on the device, or None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]  # cached blocks may be too small: not counted
    return bytes_in("/proc/meminfo", "MemAvailable") if device.type == "cpu" else None


def bytes_in(path: str, name: str) -> int | None:
    """What a file of Linux's /proc says in kB in the line of `name`; None on other systems."""
    if sys.platform != "linux":
        return None
    return 1024 * int(Path(path).read_text().split(f"{name}:")[1].split()[0])


# ---- what the machine is, and how fast -----------------------------------------------------------


def cpu_info() -> tuple[str, set]:
    """(model name, instruction flags) of this CPU; no flags except on Linux x86."""
    fields = {}
    if sys.platform == "linux":
        first_core = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
        fields = dict(re.findall(r"(?m)^(.*?)\s*: (.*)$", first_core))
    return fields.get("model name", platform.machine()), set(fields.get("flags", "").split())


def device_name(device: torch.device) -> str:
    """The name of the device: 'NVIDIA H200', 'Intel(R) Xeon(R) Processor', 'arm64'."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_info()[0]


def describe_machine(device: torch.device) -> dict:
    """Versions and hardware, recorded because they could explain a difference between two runs."""
    driver = Path("/proc/driver/nvidia/version")
    return {
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "numpy": np.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,
        },
        "hardware": {
            "platform": platform.platform(),
            "cpu": cpu_info()[0],
            "instruction_set": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "device": device_name(device),
            "world_size": world_size(),
            "driver": driver.read_text().splitlines()[0] if driver.exists() else None,
        },
    }


def peak_flops(device: torch.device, dtype: str) -> tuple[float, str]:
    """(FLOP/s, source) for MFU: from the datasheet, or from a measured matrix product. NaN if the
    machine is too busy to measure it."""
    name = device_name(device)
    if known := datasheet_peak(name, dtype):
        return known, f"datasheet of the {name}"
    rate, size = matmul_rate(device, getattr(torch, dtype))
    reset_peak_memory(device)  # the run's memory must not include the matrices
    return rate, f"measured, {size}-cubed matrix product"


def datasheet_peak(gpu: str, dtype: str) -> float | None:
    """FLOP/s of the GPU with exactly this name, or None if PEAKS does not list it."""
    row = PEAKS.get(gpu.removeprefix("NVIDIA "))
    return row and row[dtype == "float32"]


def matmul_rate(device: torch.device, dtype: torch.dtype, sizes=SIZES) -> tuple[float, int]:
    """(FLOP/s, size) of the fastest square matrix product. The size doubles as long as the next
    product, which takes eight times as long, should take less than 0.03 s. NaN if the typical
    product of the last size falls short of the fastest by more than a quarter: on a quiet machine
    both are equally fast."""
    rates = []
    for size in sizes:
        a = torch.ones(size, size, device=device, dtype=dtype)
        # item() waits for the device
        seconds = timeit.repeat(lambda a=a: torch.mm(a, a)[0, 0].item(), number=1, repeat=10)
        rates.append((2 * size**3 / min(seconds), size))
        if 8 * min(seconds) >= 0.03:
            break
    rate, best_size = max(rates)
    typical = 2 * size**3 / median(seconds)
    return rate if rate <= 1.25 * typical else math.nan, best_size


def precise(device: torch.device) -> torch.dtype:
    """float64, which MPS does not have."""
    return torch.float32 if device.type == "mps" else torch.float64


def flops_per_token(model: torch.nn.Module) -> float:
    """FLOPs to train on one token, or NaN if the model does not tell them, or fails to."""
    try:
        return float(model.flops_per_token())
    except Exception:  # an estimate must not end a run
        return math.nan


def speed_up_start_and_exit() -> None:
    """Call this after torch is imported and before the first optimizer is made.

    Keeps torch.optim from importing torch._dynamo, which takes about half as long as torch. Methods
    of its optimizers import it on their first call, only to tell the compiler not to trace them
    (torch/_compile.py). Nothing else that they do changes, unless one is differentiable=True:
    optimizers are not compiled, even if the model is."""
    for owner in (torch.optim.Optimizer, *torch.optim.Optimizer.__subclasses__()):
        for name, method in list(vars(owner).items()):
            imports_dynamo = "_dynamo" in getattr(getattr(method, "__code__", None), "co_names", ())
            plain = getattr(method, "__wrapped__", None)
            if imports_dynamo and plain:
                setattr(owner, name, torch.no_grad()(plain) if name == "step" else plain)
    atexit.register(gc.freeze)  # else Python searches all of torch for garbage at exit


def exit_process(code: int) -> None:
    """Exit with `code`; after a run with ranks, without Python's finalization, in which threads of
    a process group that still wait for Python's lock abort the process, and torchrun with it."""
    if "WORLD_SIZE" not in os.environ:
        sys.exit(code)
    atexit._run_exitfuncs()
    os._exit(code)
