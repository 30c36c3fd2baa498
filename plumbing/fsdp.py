"""Sharded models (FSDP2): each rank keeps a share of weights, gradients and moments. Read this only
if you shard."""

import torch

from plumbing.ranks import world_size


def shard(model: torch.nn.Module, device: torch.device, dtype: str) -> torch.nn.Module:
    """Shard each weight of `model`, an nn.Module on the CPU, over the ranks by rows (FSDP2).

    If it has `blocks`, the weights of each are gathered just before it computes, in the forward and
    again in the backward pass. They are sent in `dtype` (its name) if all of them are matrices,
    which autocast would round anyway; a LayerNorm's gain must stay float32. Gradients are summed in
    float32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    how = {"mesh": init_device_mesh(device.type, (world_size(),)), "reshard_after_forward": True}
    low = MixedPrecisionPolicy(
        param_dtype=getattr(torch, dtype),
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # rotary tables are inputs, and must stay float32
    )
    blocks = list(getattr(model, "blocks", []))
    for block in blocks:
        matrices = all(weight.dim() > 1 for weight in block.parameters())
        fully_shard(block, mp_policy=low if matrices else MixedPrecisionPolicy(), **how)
    fully_shard(model, **how)
    for module in (*blocks, model):
        module.set_gradient_divide_factor(1.0)  # sums, as ranks.sum_over_ranks() does
        module.set_force_sum_reduction_for_comms(True)
        # zeros where a rank has no gradient, as ranks.sum_gradients() has for plain models
        module.set_reduce_scatter_unused_params(True)
    return model


@torch.no_grad()
def shard_like(weight: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
    """`value`, complete on every rank, sharded like `weight` if their shapes agree, else
    unchanged."""
    to_shard = hasattr(weight, "to_local") and not hasattr(value, "to_local")
    if not to_shard or getattr(value, "shape", None) != weight.shape:
        return value
    from torch.distributed.tensor import distribute_tensor  # slow to import

    return distribute_tensor(value, weight.device_mesh, weight.placements, src_data_rank=None)
