"""Buffers that a forward pass moves, such as BatchNorm's statistics: as a step found them."""

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
        """As they are now: a forward pass may also put a new tensor in the place of a buffer."""
        return [module._buffers[name] for module, name in self.places]

    @torch.no_grad()
    def put_back(self):
        for buffer, before in zip(self.live(), self.before, strict=True):
            buffer.copy_(before)

    @torch.no_grad()
    def finish_step(self, skipped):
        """Average the floating-point ones over the ranks, which saw different sequences; but where
        `skipped` (a device scalar) is 1, put all back."""
        moving = {id(b): b for b in self.live() if b.is_floating_point()}  # a shared one once
        if moving and world_size() > 1:
            sum_over_ranks(list(moving.values()))
            for buffer in moving.values():
                buffer /= world_size()
        for buffer, before in zip(self.live(), self.before, strict=True):
            buffer.copy_(torch.where(skipped.bool(), before, buffer))
