"""The memory of a training step, by arithmetic, before the first one is taken."""

import torch

from plumbing.ranks import local, sharded


def training_memory(model, optimizers, micro_batch, dtype, device_type, world_size=1):
    """Bytes of tensors that an uncompiled step holds at its peak on this device, by kind: weights,
    gradients, optimizer, activations, and of a sharded model gathered; None for a kind that cannot be
    told.

    micro_batch: sequences. dtype: "float32", or that of autocast. AdamW comes to 16 bytes a parameter,
    SGD with momentum to 12, plain SGD to 8; sharded, this rank's part counts. Gradients and activations
    overlap in full only where gradients accumulate.
    """
    weights = on_device(model.parameters(), device_type)
    gradients = sum(weight.nbytes for weight in weights if weight.requires_grad)
    moments = [moment_memory(optimizer, device_type) for optimizer in optimizers]
    activations = None
    if hasattr(model, "activation_memory"):
        activations = model.activation_memory(micro_batch, dtype, device_type)
        if world_size > 1 and not sharded(model):
            # activations are gone when ranks sum their gradients in one flat buffer
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
    """This rank's part of each, but for those that are offloaded to the host's memory."""
    parts = [local(weight) for weight in weights]
    return [part for part in parts if device_type == "cpu" or not part.is_cpu]


def moment_memory(optimizer, device_type):
    """Bytes that an optimizer keeps for its weights: so many `moments` of their size; None if unknown."""
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
    """Bytes that a rank of a sharded model (FSDP2) holds for a time beside its share: within a quarter
    of a step's peak, by measurement on two CPU ranks.

    What is in no block is whole throughout, in float32, and at the end its gradients are too. Of the
    blocks, one has its weights and gradients whole, which are summed in float32, and the next one its
    weights.
    """
    blocks = [sum(w.numel() for w in block.parameters()) for block in getattr(model, "blocks", [])]
    rest = sum(weight.numel() for weight in model.parameters()) - sum(blocks)
    width = 4 if dtype == "float32" else 2
    return 4 * rest + max(4 * rest, (3 * width + 4) * max(blocks, default=0))
