"""Several processes, one for each device: joining and leaving, agreements, sums, sharded models.

With a single process these functions do not communicate, so callers need no special case for it.
"""

import contextlib
import datetime
import os
import zlib

import torch
import torch.distributed as dist

from plumbing.cli import fail

_store = None  # key-value store that the ranks of the process group share
_begun = 0  # collectives that this rank has begun in the group


@contextlib.contextmanager
def joined(device, hang_minutes, shard=False, offload=False):
    """A context in which torchrun's processes form a group. Without torchrun there is none.

    Tensors on a GPU go through NCCL, those on the CPU through gloo. A rank that waits for another
    gives up after hang_minutes, and names it. Exits with 2 if `shard` is set without torchrun, or
    `offload` without `shard`.
    """
    global _store, _begun
    if shard and "WORLD_SIZE" not in os.environ:
        fail("--shard=true: expected several ranks; start torchrun --nproc_per_node=2 train.py")
    if offload and not shard:
        fail("--offload=true: expected --shard=true with it")
    if "WORLD_SIZE" not in os.environ:
        yield
        return
    _begun = 0
    _store, number, count = rendezvous()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        timeout=datetime.timedelta(minutes=hang_minutes),
        world_size=count,
        rank=number,
        store=_store,
    )
    try:
        first = torch.ones(1, device=device)
        sum_over_ranks([first])  # NCCL connects here: its time and its errors belong to the start
        first.item()  # waits for the device
        yield
    finally:
        _store = None
        # After a failure the GPU may wait in a sum for a rank that is gone, and destroying the group
        # would wait for that sum. Python's exit aborts the group instead (~ProcessGroupNCCL).
        with contextlib.suppress(RuntimeError):  # a GPU error, already reported
            if device.type != "cuda" or torch.cuda.current_stream(device).query():
                dist.destroy_process_group()


def rendezvous():
    """(store, rank, world size), from torchrun's environment variables."""
    one_node = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    shared_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if shared_store and restarts and not one_node:
        fail(
            "--max-restarts on several nodes: new ranks would look for dead ones; write, on each "
            "node, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --rdzv-backend=c10d ..."
        )
    store, number, count = next(dist.rendezvous("env://"))
    if one_node:
        # torchrun's store outlives a restart: without a prefix for each attempt, new ranks would
        # find the addresses of dead ones in it. On several nodes no prefix helps: each agent counts
        # its own attempts, and keeps the address of the first store (pytorch#135712).
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.PrefixStore(f"attempt_{attempt}", store)
    return store, number, count


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def share(first, count):
    """(first, count) of this rank's part of the `count` sequences that begin with `first`."""
    begin = count * rank() // world_size()
    end = count * (rank() + 1) // world_size()
    return first + begin, end - begin


def say(*words, file=None):
    """Print on rank 0 only, so that all ranks have one log. What cannot be written is dropped."""
    if rank() == 0:
        with contextlib.suppress(OSError, ValueError):  # a full disk, a closed pipe or terminal
            print(*words, file=file, flush=True)


def collective():
    """Whether there are other ranks. Publishes how many collectives this rank has begun."""
    global _begun
    if not dist.is_initialized():
        return False
    _begun += 1
    with contextlib.suppress(RuntimeError):  # the store is gone; the run will fail soon
        _store.set(f"collectives_{rank()}", str(_begun))  # 5 us: it does not wait for an answer
    return True


def stragglers():
    """The ranks that have begun fewer collectives than this one: the others wait for them."""
    try:
        begun = [int(_store.get(f"collectives_{number}")) for number in range(world_size())]
    except RuntimeError:  # the store is gone too
        return []
    return [number for number, count in enumerate(begun) if count < _begun]


def agree(*flags):
    """The largest of each flag over all ranks. Uses CPU tensors: never waits for the device."""
    if collective():
        flags = torch.tensor(flags)
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        flags = flags.tolist()
    return flags


def from_rank0(function, *args):
    """Call function(*args) on rank 0 only. Every rank returns its result, or raises its error."""
    result = None
    if rank() == 0:
        try:
            result = function(*args)
        except (Exception, SystemExit) as error:
            result = error
    result = from_all_ranks(result)[0]
    if isinstance(result, BaseException):
        raise result
    return result


def from_all_ranks(value):
    """[value of rank 0, value of rank 1, ...], on every rank."""
    values = [value] * world_size()
    if collective():
        dist.all_gather_object(values, value)
    return values


@torch.no_grad()
def sum_over_ranks(tensors):
    """Sum each tensor over the ranks, in place, by one all-reduce per dtype and device; return them.

    One flat buffer in a fixed order keeps a resumed run bit-exact with any number of ranks. DDP's
    buckets, which it rebuilds after its first step, do not with three ranks or more.
    """
    if world_size() == 1:
        return tensors
    for kind in dict.fromkeys((t.dtype, t.device) for t in tensors):
        alike = [t for t in tensors if (t.dtype, t.device) == kind]
        flat = torch.cat([t.flatten() for t in alike])
        collective()
        dist.all_reduce(flat)
        for tensor, part in zip(alike, flat.split([t.numel() for t in alike]), strict=True):
            tensor.copy_(part.view_as(tensor))
    return tensors


def replicas_differ(tensors):
    """The names in `tensors`, {name: tensor or value}, that are not the same on every rank.

    Not for sharded tensors, of which ranks hold different parts. The host waits for the device here.
    """
    if world_size() == 1:
        return []
    everyone = from_all_ranks({name: checksum(tensor) for name, tensor in tensors.items()})
    return [name for name in tensors if len({checksums[name] for checksums in everyone}) > 1]


def checksum(tensor):
    """CRC-32 of a tensor's bits, any one of which changes it, or of the repr of another value."""
    if not isinstance(tensor, torch.Tensor):
        return zlib.crc32(repr(tensor).encode())
    return zlib.crc32(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())


# ---- sharded models ------------------------------------------------------------------------------


def shard(model, device, dtype, offload):
    """Shard each weight of `model`, an nn.Module on the CPU, over the ranks by rows (FSDP2).

    If it has `blocks`, the weights of each are gathered just before it computes, in the forward and
    again in the backward pass. They are sent in `dtype` (its name) if all of them are matrices,
    which autocast would round anyway; a LayerNorm's gain must stay float32. Gradients are summed in
    float32. offload: weights, gradients and moments stay in host memory.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    how = {"mesh": init_device_mesh(device.type, (world_size(),)), "reshard_after_forward": True}
    if offload:
        how["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    low = MixedPrecisionPolicy(
        param_dtype=getattr(torch, dtype),
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # or float32 rotary tables, which are inputs, would be rounded
    )
    blocks = list(getattr(model, "blocks", []))
    for block in blocks:
        matrices = all(weight.dim() > 1 for weight in block.parameters())
        fully_shard(block, mp_policy=low if matrices else MixedPrecisionPolicy(), **how)
    fully_shard(model, **how)
    for module in (*blocks, model):
        module.set_gradient_divide_factor(1.0)  # a sum, like sum_over_ranks
        module.set_force_sum_reduction_for_comms(True)
        # zeros where a rank has no gradient, as retry_on_oom() does for plain models
        module.set_reduce_scatter_unused_params(True)
    return model


def sharded(model):
    return any(hasattr(weight, "to_local") for weight in model.parameters())


def local(tensor):
    """This rank's part of a sharded tensor, sharing its memory; any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor):
    """All of a sharded tensor; any other tensor unchanged. All ranks call it together."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@torch.no_grad()
def shard_like(weight, value):
    """`value`, complete on every rank, sharded like `weight` if their shapes agree, else unchanged.

    Only this rank's rows are copied, to the device that holds its part of `weight`.
    (distribute_tensor would first copy all of `value` to the GPU, even with offloaded weights.)
    """
    to_shard = hasattr(weight, "to_local") and not hasattr(value, "to_local")
    if not to_shard or getattr(value, "shape", None) != weight.shape:
        return value
    result = torch.empty_like(weight, dtype=value.dtype)
    parts = value.chunk(world_size())  # by rows, as FSDP2 shards: the last may be shorter
    if rank() < len(parts):
        local(result).copy_(parts[rank()])
    return result
