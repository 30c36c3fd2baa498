"""The hardware: choose device, precision and compilation by its properties; describe it.

Nothing here initializes CUDA unless the device is a GPU.
"""

import contextlib
import ctypes
import functools
import importlib.metadata
import math
import os
import platform
import shutil
import sys
import warnings
from hashlib import sha256
from pathlib import Path

import torch

from plumbing.cli import fail
from plumbing.ranks import world_size

WORTH_COMPILING = 5e13  # FLOPs of a run on a CPU from which compiling saves more time than it takes

# ---- choices -------------------------------------------------------------------------------------


def choose_device(name):
    """The torch.device of this rank for --device=name. Exits with 2 if it is not available."""
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


def choose_dtype(name, device):
    """(dtype's name, why) for --dtype=name. auto: 16 bits if the hardware computes in them."""
    _, flags = cpu_info()
    native = "float32"
    why = "nothing smaller is native here"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        native = "bfloat16" if major >= 8 else "float16"
        why = f"compute capability {major}.{minor}"
    elif device.type == "cpu":
        for flag in ("avx512_bf16", "amx_bf16"):
            if flag in flags and kernels_have_bfloat16():
                native = "bfloat16"
                why = f"this CPU has {flag}"
    elif device.type == "mps" and torch.backends.mps.is_macos_or_newer(14, 0):
        native = "bfloat16"
        why = "macOS 14 or newer"
    has_float16 = device.type == "cuda" or device.type == "cpu" and "avx512_fp16" in flags
    if name == "float16" and not has_float16:
        fail(f"--dtype=float16: this {device.type} does not compute in it; try --dtype=auto")
    return (native, why) if name == "auto" else (name, "as given")


def kernels_have_bfloat16():
    """Whether oneDNN, which multiplies matrices on a CPU, may use its bfloat16 instructions. If a
    variable such as ONEDNN_MAX_CPU_ISA=AVX2 forbids them, a product takes 100 times as long."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def choose_compile(setting, device, flops):
    """(whether to compile, why) for --compile=setting. flops: of the whole run, NaN if unknown."""
    if setting != "auto":
        return setting, "as given"
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        there = has_triton()
        return there, "Triton is installed" if there else "Triton is not installed"
    if device.type != "cpu":
        return False, f"eager on {device.type}"
    if math.isnan(flops):
        return False, "the model does not tell its FLOPs"
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if not shutil.which(compiler):
        return False, f"no C++ compiler ({compiler})"
    return flops >= WORTH_COMPILING, f"{flops:.1e} FLOPs; worth it from {WORTH_COMPILING:.0e}"


def set_deterministic(setting, device):
    """Set deterministic mode for --deterministic=setting; returns it as a bool. auto: on, except on
    MPS. Call it before the process group is built and before the first matrix product.

    If on, with CUDA, it sets these environment variables unless the user has set them:
    CUBLAS_WORKSPACE_CONFIG=:4096:8  workspaces of fixed size; otherwise cuBLAS results may vary
    NCCL_ALGO=Ring                   sums in the order of the ring: NVLS adds in the switch in any
                                     order (nccl#1497), and NCCL chooses the order of a tree
                                     (Megatron-LM's guide to deterministic training)
    """
    deterministic = device.type != "mps" if setting == "auto" else setting
    # Like torch.use_deterministic_algorithms(), but without importing Inductor, which takes most of
    # a second: if a model is compiled, plumbing/retry.py sets Inductor's option.
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
    torch.utils.deterministic.fill_uninitialized_memory = False  # it costs time and hides nothing
    if deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")
    return deterministic


def keep_freed_memory():
    """Make malloc keep freed memory for the next step, which allocates the same large blocks again.

    By default glibc returns them to the system, and the page faults that follow cost a fifth of a
    step or more. The memory kept is what the peak needed anyway. Without glibc, this does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no block gets a mapping of its own
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: shrink only if 2 GiB at its end are free
        libc.mallopt(-2, 64 * 2**20)  # M_TOP_PAD: grow by 64 MiB more than is needed


# ---- copies --------------------------------------------------------------------------------------


def copies_in_background(device):
    """Whether the host may continue before a copy between it and `device` has ended.

    On MPS such a copy does not keep the host's memory alive: if that is freed or read too early,
    the result is garbage (pytorch#189690). CUDA keeps pinned memory until the copy has ended.
    """
    return device.type == "cuda"


def upload(tensor, device):
    """Copy `tensor` from the host to the device."""
    return tensor.to(device, non_blocking=copies_in_background(device))


# ---- load and memory -----------------------------------------------------------------------------


def synchronize(device):
    """Wait until the device has finished all queued work."""
    torch.get_device_module(device).synchronize()


def gpu_util(device):
    """Utilization of the GPU in percent, from NVML; None if it is not available."""
    with contextlib.suppress(Exception):  # no pynvml, no driver, a GPU of another maker
        return torch.cuda.utilization(device) if device.type == "cuda" else None


def memory_gb(device):
    """Peak memory in 1e9 bytes: of the allocator on CUDA, else of the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    try:
        import resource
    except ImportError:  # Windows
        warnings.warn("peak memory is not known on this system: mem_gb stays empty", stacklevel=2)
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def free_memory(device):
    """Bytes free on the device, or None if unknown. On MPS, the maximum recommended in all."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    try:
        return int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return None


# ---- names and fingerprints ----------------------------------------------------------------------


@functools.cache
def cpu_info():
    """(model name, set of instruction flags) of this CPU; the set is empty except on Linux x86."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine(), frozenset()
    fields = dict(map(str.strip, line.split(":", 1)) for line in lines if ":" in line)
    return fields.get("model name", platform.machine()), frozenset(fields.get("flags", "").split())


def device_name(device):
    """The name of the device: 'NVIDIA H200', 'Intel(R) Xeon(R) Processor', 'arm mps'."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_info()[0] if device.type == "cpu" else f"{platform.processor()} {device.type}"


def matmul_bits(device, dtype):
    """Hash of a fixed matrix product. Another hash means that other kernels compute here, such as
    those for a CPU without AMX. dtype: a torch.dtype."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator) for shape in ((256, 1024), (1024, 256)))
    product = a.to(device, dtype) @ b.to(device, dtype)
    return sha256(product.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def fingerprint(device):
    """Versions and hardware, recorded because they could explain a difference between two runs."""
    cpu, flags = cpu_info()
    cuda = device.type == "cuda"
    driver = None
    if cuda:
        with contextlib.suppress(Exception):  # nice to have, never a reason to stop
            import pynvml

            pynvml.nvmlInit()
            driver = pynvml.nvmlSystemGetDriverVersion()
    about = [distribution.metadata for distribution in importlib.metadata.distributions()]
    packages = {each["Name"]: each["Version"] for each in about}
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
