"""The hardware: device, precision and compilation chosen by its properties; what it is called.

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

from plumbing.configurator import fail
from plumbing.ranks import world_size

WORTH_COMPILING = 5e13  # FLOPs of a run on a CPU, from which on compiling pays back its seconds

# ---- what is chosen ------------------------------------------------------------------------------


def choose_device(name):
    """The torch.device of this rank for --device=name; exits (2) where it is not there."""
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
        why = str(error).partition("\n")[0].partition(". ")[0] or "it is not there"
        fail(f"--device={name}: {why}; --device=auto takes what is there")
    if device.type == "cpu":
        keep_freed_memory()
    return device


def choose_dtype(name, device):
    """(dtype's name, why) for --dtype=name: auto is what this hardware really computes in."""
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
    """Whether oneDNN, which multiplies matrices on a CPU, may use what the CPU has for bfloat16. Where a
    variable such as ONEDNN_MAX_CPU_ISA=AVX2 forbids it, a product takes a hundred times as long."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def choose_compile(setting, device, flops):
    """(whether, why) for --compile=setting. flops: of the whole run, or NaN where the model cannot tell."""
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
    """Sets deterministic mode for --deterministic=setting, and returns it as a bool: auto is on, but
    on MPS. To be called before the process group is built and before the first matrix product.

    In the environment, unless the user has set them:
    CUBLAS_WORKSPACE_CONFIG=:4096:8  a workspace of fixed size, without which cuBLAS may vary
    NCCL_ALGO=Ring                   sums in the order of the ring: NVLS adds up in the switch in any
                                     order (nccl#1497), and the order of a tree is NCCL's to choose
                                     (Megatron-LM's guide to deterministic training)
    """
    deterministic = device.type != "mps" if setting == "auto" else setting
    # As torch.use_deterministic_algorithms(), but without Inductor, which takes most of a second to
    # import: where a model is compiled, plumbing/retry.py sets it too.
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
    torch.utils.deterministic.fill_uninitialized_memory = False  # it costs time and hides nothing
    if deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")
    return deterministic


def keep_freed_memory():
    """Has malloc keep what is freed for the next step, which takes the same large blocks again.

    glibc returns each to the system by default, and the page faults that follow cost a fifth of a step
    or more. What is kept is what the peak needed anyway. Without glibc, nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no block is a mapping of its own
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: the heap never shrinks
        libc.mallopt(-2, 64 * 2**20)  # M_TOP_PAD: and grows by 64 MiB at a time


# ---- copies --------------------------------------------------------------------------------------


def copies_in_background(device):
    """Whether a copy between the host and `device` may go on while the host does.

    On MPS such a copy reads the host's memory, or writes it, without holding it: what is freed or read
    before it is done is garbage (pytorch#189690). CUDA keeps pinned memory until the copy is through.
    """
    return device.type == "cuda"


def upload(tensor, device):
    """`tensor`, which is the host's, on the device."""
    return tensor.to(device, non_blocking=copies_in_background(device))


# ---- its memory ----------------------------------------------------------------------------------


def synchronize(device):
    """Waits until the device has done all that it was given."""
    torch.get_device_module(device).synchronize()


def gpu_util(device):
    """Utilization of the GPU in percent, from NVML; None where there is none to ask."""
    with contextlib.suppress(Exception):  # no pynvml, no driver, a GPU of another maker
        return torch.cuda.utilization(device) if device.type == "cuda" else None


def memory_gb(device):
    """Peak memory in 1e9 bytes: the allocator's on a GPU, the process's resident set elsewhere."""
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
    """Bytes that a run could take on the device now, or None where the system does not tell."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    try:
        return int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return None


# ---- what it is called ---------------------------------------------------------------------------


@functools.cache
def cpu_info():
    """(model name, set of instruction flags) of this CPU; Linux tells the flags, others may not."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine(), frozenset()
    fields = dict(map(str.strip, line.split(":", 1)) for line in lines if ":" in line)
    return fields.get("model name", platform.machine()), frozenset(fields.get("flags", "").split())


def device_name(device):
    """What the device calls itself: 'NVIDIA H200', 'Intel(R) Xeon(R) Processor', 'Apple mps'."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_info()[0] if device.type == "cpu" else f"{platform.processor()} {device.type}"


def matmul_bits(device, dtype):
    """A hash of one fixed matrix product: another one means that other kernels compute here, such as
    those for a CPU without AMX. dtype: a torch.dtype."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(shape, generator=generator) for shape in ((256, 1024), (1024, 256)))
    product = a.to(device, dtype) @ b.to(device, dtype)
    return sha256(product.cpu().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def fingerprint(device):
    """Everything about software and hardware that could explain a difference between two runs."""
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
