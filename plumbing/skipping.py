"""Skip a step: weights, moments and buffers (such as BatchNorm's statistics) stay unchanged."""

import torch

from plumbing.ranks import sum_over_ranks, world_size


class Buffers:
    """The persistent buffers of a model, and a copy of each. GPT has none."""

    def __init__(self, model):
        self.places = [
            (module, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]
        self.before = [buffer.clone() for buffer in self.live()]

    def live(self):
        """The current tensors: a forward pass may replace a buffer by another tensor."""
        return [module._buffers[name] for module, name in self.places]

    @torch.no_grad()
    def put_back(self):
        for buffer, before in zip(self.live(), self.before, strict=True):
            buffer.copy_(before)

    @torch.no_grad()
    def finish_step(self, skipped):
        """Average the floating-point buffers over the ranks, which saw different sequences; but if
        `skipped` (a device scalar) is 1, restore all buffers."""
        moving = {id(b): b for b in self.live() if b.is_floating_point()}  # shared: once
        if moving and world_size() > 1:
            sum_over_ranks(list(moving.values()))
            for buffer in moving.values():
                buffer /= world_size()
        for buffer, before in zip(self.live(), self.before, strict=True):
            buffer.copy_(torch.where(skipped.bool(), before, buffer))


def skips_on_device(optimizer):
    """Whether step() is torch's fused one or our Muon's, and no subclass, hook or wrapper adds to it."""
    if vars(type(optimizer)).get("skips_on_device"):  # vars: a subclass has to say it again
        return "step" not in vars(optimizer)
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return not hooks and str(optimizer.step.__module__).startswith("torch.")


@torch.no_grad()
def step_unless(skipped, optimizer):
    """Call optimizer.step() unless `skipped` is 1: then weights and moments stay as they are.

    torch's fused kernels read the flag on the device. For any other step the host waits for it.
    """
    if not skips_on_device(optimizer):
        if not skipped.item():
            optimizer.step()
        return
    for group in optimizer.param_groups:  # torch would start it with the bad gradient
        for weight in group["params"] if group.get("momentum") else ():
            if "momentum_buffer" not in optimizer.state[weight]:
                optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    optimizer.grad_scale = None
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    optimizer.found_inf = skipped.to(weights[0].device) if weights else skipped
    optimizer.step()
