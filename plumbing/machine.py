"""The hardware: choose device, precision and compilation by its properties; its peak; describe it.
Nothing here initializes CUDA unless the device is a GPU."""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib.metadata
import math
import os
import platform
import resource
import shutil
import sys
import time
from hashlib import sha256
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from plumbing.cli import fail, show
from plumbing.ranks import world_size

CUBLAS, FIXED_WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", (":4096:8", ":16:8")
os.environ.setdefault(
    CUBLAS, FIXED_WORKSPACES[0]
)  # here: cuBLAS reads it once, at its first product

WORTH_COMPILING = 5e13  # FLOPs of a run on a CPU from which compiling saves more time than it takes
STEPS_WORTH_COMPILING = 1000  # the same on a GPU, where compiling takes most of a minute

# Peak FLOP/s of dense matrix products from the makers' datasheets: bfloat16, float16, float32 (not
# TF32). Names are complete, without "NVIDIA ": if a part sufficed, an RTX A1000 would get the peak
# of an A100, and a MIG slice that of the whole GPU. Other devices are measured.
PEAKS = {
    ("B200",): (2250e12, 2250e12, 75e12),
    ("H200", "H100 80GB HBM3"): (989e12, 989e12, 67e12),
    ("H100 PCIe",): (756e12, 756e12, 51e12),
    ("A100-SXM4-40GB", "A100-SXM4-80GB"): (312e12, 312e12, 19.5e12),
    ("A100-PCIE-40GB", "A100 80GB PCIe"): (312e12, 312e12, 19.5e12),
    ("A10G",): (70e12, 70e12, 35e12),
    ("L40S",): (362e12, 362e12, 91.6e12),
    ("L4",): (121e12, 121e12, 30.3e12),
    ("GeForce RTX 4090",): (165e12, 165e12, 82.6e12),
    ("GeForce RTX 3090",): (71e12, 71e12, 35.6e12),
    ("Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB"): (None, 125e12, 15.7e12),
    ("Tesla T4",): (None, 65e12, 8.1e12),
}

# For --deterministic=portable: what all x86-64 CPUs with AVX2 have, and what they compute with it.
PORTABLE_KERNELS = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "COMPATIBLE",  # for MKL, AVX2 is not the same on Intel and AMD
}
PORTABLE_KNOBS = {"device": "cpu", "dtype": "float32", "compile": False}
PORTABLE_BITS = "f4deb579ee7e346f"  # kernel_bits() of float32 and Muon
PORTABLE_RELEASE = "2.13.0"  # of torch, whose bits these are


def choose_device(name: str) -> torch.device:
    """The torch.device of this rank for --device=name. Raises BadInput if it is not available."""
    kind = name
    if name == "auto":
        found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        kind = next((kind for kind in found if found[kind]), "cpu")
    one_gpu = kind == "mps" or kind.startswith("cuda:")
    if one_gpu and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        fail(f"--device={name}: all ranks would share one GPU; try --device=cuda, or --device=cpu")
    if kind == "cuda":
        kind = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        device = torch.device(kind)
        if device.type == "cuda":
            torch.cuda.init()
            torch.cuda.set_device(device)  # first, or the tensor below also occupies GPU 0
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).partition("\n")[0].partition(". ")[0] or "it is not available"
        fail(f"--device={name}: {why}; --device=auto takes what is available")
    if device.type == "cpu":
        keep_freed_memory()
    return device


def choose_dtype(name: str, device: torch.device) -> tuple[str, str]:
    """(dtype's name, why) for --dtype=name. auto: 16 bits if the hardware computes in them."""
    _, flags = cpu_info()
    has_float16 = device.type == "cuda" or device.type == "cpu" and "avx512_fp16" in flags
    if name == "float16" and not has_float16:
        fail(f"--dtype=float16: this {device.type} does not compute in it; try --dtype=auto")
    if name != "auto":
        return name, "as given"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return "bfloat16" if major >= 8 else "float16", f"compute capability {major}.{minor}"
    if device.type == "mps" and torch.backends.mps.is_macos_or_newer(14, 0):
        return "bfloat16", "macOS 14 or newer"
    native = flags & {"amx_bf16", "avx512_bf16"}
    if device.type == "cpu" and native and kernels_have_bfloat16():
        return "bfloat16", f"this CPU has {min(native)}"
    return "float32", "nothing smaller is native here"


def kernels_have_bfloat16() -> bool:
    """Whether oneDNN may use the CPU's: a variable such as ONEDNN_MAX_CPU_ISA=AVX2 forbids them."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def choose_compile(setting: bool | str, device: torch.device, flops: float, steps: int) -> tuple:
    """(whether to compile, why) for --compile=setting. flops (may be NaN), steps: of the whole
    run."""
    if setting != "auto":
        return setting, "as given"
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            return False, "Triton is not installed"
        return steps >= STEPS_WORTH_COMPILING, f"worth it from {STEPS_WORTH_COMPILING:,} steps"
    if device.type != "cpu":
        return False, f"eager on {device.type}"
    if math.isnan(flops):
        return False, "the model does not tell its FLOPs"
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if not shutil.which(compiler):
        return False, f"no C++ compiler ({compiler})"
    return flops >= WORTH_COMPILING, f"{flops:.1e} FLOPs; worth it from {WORTH_COMPILING:.0e}"


def pin_kernels(config: dict) -> dict:
    """For --deterministic=portable, make this process compute the bits that every x86-64 CPU with
    AVX2 computes, until it ends: in float32, eager, on one thread. Else do nothing.

    config: the knobs of train.py. Returns those that the mode sets. Call it before the first
    operation: each library chooses its kernels once. Raises BadInput if a knob contradicts the
    mode, or if the kernels are not those: it compares kernel_bits()."""
    if config["deterministic"] != "portable":
        return {}
    for name, value in PORTABLE_KNOBS.items():
        if config[name] not in ("auto", value):
            found = f"found --{name}={show(config[name])}"
            fail(f"--deterministic=portable: expected --{name}={show(value)}, {found}")
    cpu, flags = cpu_info()
    if "avx2" not in flags:
        fail(f"--deterministic=portable: expected Linux on an x86-64 CPU with AVX2, found {cpu}")
    os.environ.update(PORTABLE_KERNELS)
    torch.set_num_threads(1)  # MKL divides some sums by the number of threads
    capability = torch.backends.cpu.get_cpu_capability()
    bits = kernel_bits(torch.device("cpu"), "float32", "muon")
    if (capability, bits) != ("AVX2", PORTABLE_BITS):
        why = "an operation ran before train.main; start a new process"
        release = torch.__version__.partition("+")[0]
        if release != PORTABLE_RELEASE:
            why = f"these bits are those of torch {PORTABLE_RELEASE}, and this is {release}"
        fail(
            f"--deterministic=portable: expected AVX2 kernels with the bits {PORTABLE_BITS}, "
            f"found {capability} and {bits}: {why}"
        )
    return PORTABLE_KNOBS


def set_deterministic(setting: bool | str, device: torch.device) -> bool | str:
    """Set deterministic mode for --deterministic=setting. auto: on, except on MPS. Returns the
    setting, never auto. Call it before the process group is built and before the first matrix
    product."""
    deterministic = device.type != "mps" if setting == "auto" else setting
    if deterministic and device.type == "cuda":
        if os.environ[CUBLAS] not in FIXED_WORKSPACES:
            allowed = " or ".join(FIXED_WORKSPACES)
            fail(f"{CUBLAS}={os.environ[CUBLAS]}: expected {allowed}, or --deterministic=false")
        os.environ.setdefault("NCCL_ALGO", "Ring")  # NVLS adds in any order (nccl#1497)
    # Like torch.use_deterministic_algorithms(), but without importing Inductor, which takes most of
    # a second: if a model is compiled, rehearse() in safe_step.py sets Inductor's option.
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
    torch.utils.deterministic.fill_uninitialized_memory = False  # it costs time and hides nothing
    return deterministic


def keep_freed_memory(keep: bool = True) -> None:
    """Make glibc's malloc keep freed memory for the next step, which allocates the same large
    blocks again: returned to the system, they cost page faults, a fifth of a step or more.
    keep=False: large blocks that are allocated from here on are returned when they are freed."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0 if keep else 65536)  # M_MMAP_MAX: how many get a mapping of their own
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: shrink only if 2 GiB at its end are free
        libc.mallopt(-2, 64 * 2**20)  # M_TOP_PAD: grow by 64 MiB more than is needed


def copies_in_background(device: torch.device) -> bool:
    """Whether the host goes on during a copy. On MPS, its memory would not be kept
    (pytorch#189690)."""
    return device.type == "cuda"


def synchronize(device: torch.device) -> None:
    torch.get_device_module(device).synchronize()


def gpu_util(device: torch.device) -> float | None:
    """Utilization of the GPU in percent, from NVML; None if it is not available."""
    with contextlib.suppress(Exception):  # no pynvml, no driver, a GPU of another maker
        return torch.cuda.utilization(device) if device.type == "cuda" else None


def memory_gb(device: torch.device) -> float | None:
    """Memory in 1e9 bytes: the peak of CUDA's allocator since reset_peak_memory(), else what this
    process has at present, without the pages of files, such as the data, that it has mapped."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    status = Path("/proc/self/status")
    if not status.exists():  # not Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e9  # in bytes on macOS
    return int(status.read_text().split("RssAnon:")[1].split()[0]) * 1024e-9


def reset_peak_memory(device: torch.device) -> None:
    """So that the memory of an evaluation or a rehearsal does not count as that of training."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def free_memory(device: torch.device) -> int | None:
    """Bytes free on the device, or None if unknown. On MPS, the maximum recommended in all."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]  # cached blocks may be too small: not counted
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    with contextlib.suppress(OSError):  # no /proc
        return int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) * 1024


@functools.cache
def cpu_info() -> tuple[str, frozenset]:
    """(model name, set of instruction flags) of this CPU; the set is empty except on Linux x86."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine(), frozenset()
    fields = dict(map(str.strip, line.split(":", 1)) for line in lines if ":" in line)
    return fields.get("model name", platform.machine()), frozenset(fields.get("flags", "").split())


def device_name(device: torch.device) -> str:
    """The name of the device: 'NVIDIA H200', 'Intel(R) Xeon(R) Processor', 'arm mps'."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_info()[0] if device.type == "cpu" else f"{platform.processor()} {device.type}"


def kernel_bits(device: torch.device, dtype: str, optimizer: str) -> str:
    """16 hex digits: the hash of one small, fixed training step in eager mode, in `dtype` on
    `device`.

    With other kernels, such as those without AVX512 or AMX, it is another. It depends on neither
    model.py nor optim.py, which a fork may change, and leaves the global random state alone.
    optimizer: the run's; one that is not torch's or Muon counts as adamw.
    """
    own = torch.Generator().manual_seed(0)
    on_device = torch.Generator(device).manual_seed(0)
    T, C, H, V = 64, 128, 4, 256  # tokens, width, heads, vocabulary
    shapes = [(V, C), (3 * C, C), (C, C), (16 * C, C), (C, 8 * C), (V, C)]
    weights = [torch.randn(shape, generator=own) / shape[1] ** 0.5 for shape in shapes]
    weights = [weight.to(device).requires_grad_() for weight in weights]
    table, qkv, out, up, down, head = weights
    tokens = torch.randperm(V, generator=own)[:T].to(device)  # each once: no order of a sum is open

    with torch.autocast(device.type, getattr(torch, dtype), enabled=dtype != "float32"):
        x = F.embedding(tokens, table)[None]
        q, k, v = F.linear(F.layer_norm(x, (C,)), qkv).view(1, T, 3, H, C // H).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        scores = (q @ k.transpose(2, 3)).softmax(dim=-1)
        seen = (scores @ v).transpose(1, 2).flatten(2)
        kept = torch.empty_like(seen).bernoulli_(0.9, generator=on_device)
        x = x + F.linear(seen * kept, out)
        gate, value = F.linear(F.layer_norm(x, (C,)), up).chunk(2, dim=-1)
        x = x + F.linear(F.silu(gate) * value, down)
        logits = F.linear(F.layer_norm(x, (C,)), head)
    loss = F.cross_entropy(logits[0].float(), tokens.flip(0))
    loss.backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(weights, 0.1)
    moments = small_update(weights, optimizer)

    digest = sha256()
    for tensor in (loss, grad_norm, *weights, *moments):
        digest.update(tensor.detach().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


@torch.no_grad()
def small_update(weights: list[torch.Tensor], optimizer: str) -> list[torch.Tensor]:
    """Update `weights` once with the kernels of `optimizer`. Returns its moments."""
    gradients = [weight.grad for weight in weights]
    means, squares = ([0.1 * g for g in gradients], [g * g for g in gradients])
    steps = [torch.ones((), device=weight.device) for weight in weights]
    how = {"lr": 0.1, "weight_decay": 0.1, "maximize": False}
    how["fused"] = weights[0].device.type in ("cpu", "cuda")
    if optimizer in ("sgd", "momentum"):
        rate = 0.9 if optimizer == "momentum" else 0.0
        sgd(weights, gradients, means, momentum=rate, dampening=0.0, nesterov=False, **how)
        return means
    how |= {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "amsgrad": False}
    how["decoupled_weight_decay"] = optimizer != "adam"
    adam(weights, gradients, means, squares, [], steps, **how)
    if optimizer == "muon":  # a Newton-Schulz step, in the precision that optim.py chooses
        emulated = weights[0].is_cpu and not kernels_have_bfloat16()
        matrix = gradients[1] if emulated else gradients[1].bfloat16()
        matrix = matrix / matrix.norm()
        gram = matrix.T @ matrix
        means.append(torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315).float())
    return means + squares


def describe_machine(device: torch.device) -> dict:
    """Versions and hardware, recorded because they could explain a difference between two runs."""
    cpu, flags = cpu_info()
    cuda = device.type == "cuda"
    driver = Path("/proc/driver/nvidia/version")
    about = [distribution.metadata for distribution in importlib.metadata.distributions()]
    packages = {each["Name"]: each["Version"] for each in about if each["Name"]}
    return {
        "versions": {
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version() if cuda else None,
            "packages": dict(sorted(packages.items())),
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
            "driver": driver.read_text().splitlines()[0] if driver.exists() else None,
        },
    }


def peak_flops(device: torch.device, dtype: str) -> tuple[float | None, str]:
    """(FLOP/s or None, source) for MFU: from the datasheet, or from a measured matrix product."""
    name = device_name(device)
    if known := datasheet_peak(name, dtype):
        return known, f"datasheet of the {name}"
    if device.type == "cpu" and dtype == "bfloat16" and not kernels_have_bfloat16():
        dtype = "float32"  # emulated products are far slower than the rest of a step
    try:
        rate, size = matmul_rate(device, getattr(torch, dtype))
    except RuntimeError:
        return None, "unknown: a matrix product fails on this device"
    return rate, f"measured, {size}-cubed matrix product"


def datasheet_peak(gpu: str, dtype: str) -> float | None:
    """FLOP/s of the GPU with exactly this name, or None if PEAKS does not list it."""
    column = ("bfloat16", "float16", "float32").index(dtype)
    rows = (row for names, row in PEAKS.items() if gpu.removeprefix("NVIDIA ") in names)
    return next(rows, (None, None, None))[column]


def matmul_rate(
    device: torch.device, dtype: torch.dtype, sizes: tuple = (256, 512, 1024, 2048, 4096, 8192)
) -> tuple[float, int]:
    """(FLOP/s, size) of the fastest square matrix product of these sizes, as long as the next
    one should take less than 0.03 s: this ends within a second even if dtype is emulated."""
    best = (0.0, 0)
    for size in sizes:
        a = torch.ones(size, size, device=device, dtype=dtype)
        out = torch.empty_like(a)
        times = []
        while len(times) < 3 or len(times) < 20 and sum(times) < 0.03:
            start = time.perf_counter()
            torch.mm(a, a, out=out)
            out[0, 0].item()  # waits for the device
            times.append(time.perf_counter() - start)
        best = max(best, (2 * size**3 / min(times), size))
        if 8 * min(times) > 0.03:  # twice the size is eight times the work
            break
    if device.type == "cuda":  # the run's memory must not include the matrices
        del a, out
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return best


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


def leave(code: int) -> None:
    """Exit with `code`; after a run with ranks, without Python's finalization, in which threads of
    a process group that still wait for Python's lock abort the process, and torchrun with it."""
    if "WORLD_SIZE" not in os.environ:
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
