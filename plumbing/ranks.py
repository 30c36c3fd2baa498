"""Several processes, one for each device: they join, agree, share a batch, and sum. In a single
process these functions do not communicate, so callers need no special case for it."""

import contextlib
import datetime
import os
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from plumbing.cli import RunFailed, fail

HANG_MINUTES = 30  # longest wait for another rank


@contextlib.contextmanager
def joined(device: torch.device, shard: bool = False) -> Iterator[None]:
    """A context in which torchrun's processes, if there are any, form a group. Tensors on a GPU go
    through NCCL, those on the CPU through gloo. A rank waits for another at most HANG_MINUTES."""
    if "WORLD_SIZE" not in os.environ:
        if shard:
            fail("--shard=true: expected several ranks; start torchrun --nproc_per_node=2 train.py")
        yield
        return
    backends = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    patience = datetime.timedelta(minutes=HANG_MINUTES)
    store, number, count = next(dist.rendezvous("env://", timeout=patience))  # from torchrun
    if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
        # torchrun's store outlives a restart: without a prefix for each attempt, new ranks would
        # find the addresses of dead ones in it. On several nodes no prefix helps: each agent counts
        # its own attempts (pytorch#135712; docs/scaling.md says what to set there).
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt_{attempt}", store)
    dist.init_process_group(backends, timeout=patience, world_size=count, rank=number, store=store)
    total(torch.ones(1, device=device)).item()  # NCCL connects now: its errors are of the start
    try:
        yield
    except RuntimeError as error:
        words = str(error).strip()
        if not re.search("gloo|NCCL", words):
            raise
        found = "another rank failed or is gone"
        if re.search("(?i)timed out|timeout", words):
            found = f"timed out waiting for another rank for more than {HANG_MINUTES} minutes"
        cause = words.splitlines()[-1][:160]
        raise RunFailed(f"{found} ({cause}); the same command resumes the run") from error
    # After a failure the GPU may wait in a sum for a rank that is gone, and destroying the group
    # would wait for that sum. Python's exit aborts the group instead (~ProcessGroupNCCL).
    dist.destroy_process_group()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def my_share(first: int, count: int) -> tuple[int, int]:
    """(first, count) of this rank's part of the `count` sequences that begin with `first`."""
    begin = count * rank() // world_size()
    end = count * (rank() + 1) // world_size()
    return first + begin, end - begin


def largest_share(count: int) -> int:
    """Of `count` sequences, as many as no rank exceeds."""
    return -(-count // world_size())


def check_share(count: int, shard: bool, error: type[Exception]) -> None:
    """Raises `error` if the ranks cannot share a batch of `count` sequences."""
    size = world_size()
    if count < size or (shard and count % size):
        expected = "one or more for each, with --shard=true as many for each"
        batch = f"a batch of {count} sequences (batch_size * accum_steps)"
        raise_on_all(error(f"{batch} for {size} ranks: expected {expected}"))


def max_over_ranks(*flags: float) -> list:
    """The largest of each flag over all ranks. Uses CPU tensors: never waits for the device."""
    if world_size() == 1:
        return list(flags)
    most = torch.tensor(flags)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.tolist()


def from_rank0(function: Callable, *args) -> Any:
    """What function(*args) returns or raises, on every rank. Only rank 0 calls it and prints
    errors."""
    result = None
    if rank() == 0:
        try:
            result = function(*args)
        except Exception as error:
            result = error
    result = from_all_ranks(result)[0]
    if isinstance(result, Exception):
        raise_on_all(result)
    return result


def raise_on_all(error: Exception) -> NoReturn:
    """Raise an error that every rank meets, and that rank 0 alone prints."""
    error.said = rank() > 0
    raise error


def from_all_ranks(value: Any) -> list:
    """[value of rank 0, value of rank 1, ...], on every rank."""
    values = [value] * world_size()
    if world_size() > 1:
        dist.all_gather_object(values, value)
    return values


def total(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, summed over the ranks in place."""
    return sum_over_ranks([tensor])[0]


@torch.no_grad()
def sum_gradients(model: torch.nn.Module, numbers: dict) -> None:
    """Sum the gradients of `model`, and the scalars `numbers`, over the ranks, in place. FSDP2 has
    summed those of a sharded model in its backward pass."""
    weights = [] if is_sharded(model) else list(model.parameters())
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    sum_over_ranks([*gradients, *numbers.values()])


@torch.no_grad()
def sum_over_ranks(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Sum each tensor over the ranks, in place, by one all-reduce per dtype and device; return
    them. One flat buffer in a fixed order keeps a resumed run bit-exact. DDP's buckets, which it
    rebuilds after its first step, do not with three ranks or more."""
    if world_size() == 1:
        return tensors
    for kind in dict.fromkeys((t.dtype, t.device) for t in tensors):
        alike = [t for t in tensors if (t.dtype, t.device) == kind]
        flat = torch.cat([t.flatten() for t in alike])
        dist.all_reduce(flat)
        for tensor, part in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
            tensor.copy_(part.view_as(tensor))
    return tensors


def checksum(tensor: Any) -> int:
    """CRC-32 of the bits of a value, any one of which changes it."""
    return zlib.crc32(as_bytes(tensor))


def as_bytes(value: Any) -> bytes | np.ndarray:
    """The bytes of this rank's part of a tensor, or of the repr of another value."""
    if not isinstance(value, torch.Tensor):
        return repr(value).encode()
    return local_tensor(value).detach().cpu().reshape(-1).view(torch.uint8).numpy()


def is_sharded(model: torch.nn.Module) -> bool:
    return any(hasattr(weight, "to_local") for weight in model.parameters())


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor, sharing its memory; any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """All of a sharded tensor; any other tensor unchanged. All ranks call it together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
