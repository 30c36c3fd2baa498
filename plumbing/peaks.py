"""The peak FLOP/s of a device, for MFU: from the maker's datasheet, or else measured."""

import time

import torch

from plumbing.devices import device_name

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


def peak_flops(device, dtype):
    """(FLOP/s or None, source) for MFU: from the datasheet, or from a measured matrix product."""
    known = datasheet_peak(device_name(device), dtype) if device.type == "cuda" else None
    if known:
        return known, f"datasheet of the {device_name(device)}"
    try:
        rate, size = matmul_rate(device, getattr(torch, dtype))
    except RuntimeError:
        return None, "unknown: a matrix product fails on this device"
    return rate, f"measured, {size}-cubed matrix product"


def datasheet_peak(gpu, dtype):
    """FLOP/s of the GPU with exactly this name, or None if PEAKS does not list it."""
    for names, row in PEAKS.items():
        if gpu.removeprefix("NVIDIA ") in names:
            return dict(zip(("bfloat16", "float16", "float32"), row, strict=True))[dtype]
    return None


def matmul_rate(device, dtype, sizes=None):
    """(FLOP/s, size) of the fastest square matrix product here. dtype: a torch.dtype.

    sizes: to try, from small to large. By default they double from 256 up to 2048 on a CPU and 8192
    elsewhere, while the next product should take less than 0.1 s: the measurement ends within a
    second even if dtype is emulated. Of each size the shortest time counts, because disturbances
    only make a product slower.
    """
    growing = sizes is None
    sizes = sizes or (256, 512, 1024, 2048, 4096, 8192)[: 4 if device.type == "cpu" else 6]
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
        if growing and 8 * min(times) > 0.1:  # twice the size is eight times the work
            break
    if device.type == "cuda":  # the run's memory must not include the matrices
        del a, out
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return best
