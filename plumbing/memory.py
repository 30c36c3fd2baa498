"""Estimate the memory of a training step by arithmetic, before the first step."""

import torch

from plumbing.ranks import local, sharded


def training_memory(model, optimizers, micro_batch, dtype, device_type, world_size=1):
    """Bytes of tensors that an uncompiled step holds on this device at its peak, by kind: weights,
    gradients, optimizer, activations and, for a sharded model, gathered. None for an unknown kind.

    micro_batch: sequences. dtype: "float32", or that of autocast. Without activations, AdamW needs
    16 bytes a parameter, SGD with momentum 12, plain SGD 8; if sharded, this rank's part counts.
    All gradients and all activations are held at once only if gradients accumulate over several
    micro-batches.
    """
    weights = on_device(model.parameters(), device_type)
    gradients = sum(weight.nbytes for weight in weights if weight.requires_grad)
    moments = [moment_memory(optimizer, device_type) for optimizer in optimizers]
    activations = None
    if hasattr(model, "activation_memory"):
        activations = model.activation_memory(micro_batch, dtype, device_type)
        if world_size > 1 and not sharded(model):
            # once activations are freed, ranks sum gradients in a flat buffer as large as them all
            activations = max(activations, gradients)
    needs = {
        "weights": sum(weight.nbytes for weight in weights),
        "gradients": gradients,
        "optimizer": None if None in moments else sum(moments),
        "activations": activations,
    }
    if sharded(model):
        needs["gathered"] = gathered_memory(model, dtype)
    return needs


def on_device(weights, device_type):
    """This rank's part of each weight, without those that are offloaded to host memory."""
    parts = [local(weight) for weight in weights]
    return [part for part in parts if device_type == "cpu" or not part.is_cpu]


def moment_memory(optimizer, device_type):
    """Bytes of an optimizer's moments, which are as large as its weights; None if unknown."""
    moments = {
        torch.optim.SGD: bool(optimizer.param_groups[0].get("momentum")),
        torch.optim.Adam: 2,
        torch.optim.AdamW: 2,
    }
    number = getattr(optimizer, "moments", moments.get(type(optimizer)))
    if number is None:
        return None
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return number * sum(part.nbytes for part in on_device(weights, device_type))


def gathered_memory(model, dtype):
    """Bytes that a rank of a sharded model (FSDP2) holds temporarily besides its shard. With them,
    the estimated peak of a step was within a quarter of the measured one, on two CPU ranks.

    Weights outside the blocks stay gathered in float32, and at the end so do their gradients. One
    block at a time has its weights and gradients gathered, the latter also summed in float32, and
    the next block its weights.
    """
    blocks = [sum(w.numel() for w in block.parameters()) for block in getattr(model, "blocks", [])]
    rest = sum(weight.numel() for weight in model.parameters()) - sum(blocks)
    width = 4 if dtype == "float32" else 2
    return 4 * rest + max(4 * rest, (3 * width + 4) * max(blocks, default=0))
