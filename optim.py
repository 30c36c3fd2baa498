"""How weights move: which optimizer gets which weight, and Muon. Imports nothing but torch."""

import math

import torch
from torch import Tensor, nn


def configure_optimizers(
    model: nn.Module,
    optimizer: str,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    momentum: float,
    device_type: str,
) -> list[torch.optim.Optimizer]:
    """The optimizers for `model`, any module, as a list of one, or two for "muon".

    optimizer: "adamw" (Loshchilov & Hutter 2019), "adam" (Kingma & Ba 2015; decays through the
    gradient), "sgd", "momentum" (SGD with momentum), or "muon" (Muon for hidden matrices, AdamW for
    the rest). Matrices and embeddings decay, vectors do not. Raises ValueError for another name.
    A group's rate is that of the run times its `lr_scale`, if it has one.
    """

    def group(weights, decay=weight_decay, **more):
        return {"params": weights, "weight_decay": decay, **more}

    hidden, embeddings, outer, vectors = sorted_by_role(model)
    groups = [group(hidden + embeddings + outer), group(vectors, 0.0)]
    fused = device_type in ("cpu", "cuda")  # MPS's fused kernels ignore found_inf: no step skipped
    adam = {"lr": lr, "betas": (beta1, beta2), "fused": fused}
    if optimizer == "adamw":
        optimizers = [torch.optim.AdamW(groups, **adam)]
    elif optimizer == "adam":
        optimizers = [torch.optim.Adam(groups, **adam)]
    elif optimizer in ("sgd", "momentum"):
        sharded = any(hasattr(weight, "to_local") for weight in model.parameters())
        fused = fused and not sharded  # there is none for FSDP2's DTensors (torch 2.13)
        momentum = momentum if optimizer == "momentum" else 0.0
        optimizers = [torch.optim.SGD(groups, lr=lr, momentum=momentum, fused=fused)]
    elif optimizer == "muon":
        # an embedding's row learns only where its token stands; the loss is steep in the head
        rest = group(embeddings, lr_scale=2.0), group(outer, lr_scale=0.5), groups[1]
        muon = Muon([group(hidden)], lr, momentum, weight_decay, stacked_parts(model))
        optimizers = [muon, torch.optim.AdamW(rest, **adam)]
    else:
        raise ValueError(f"optimizer={optimizer!r}: expected adamw, adam, sgd, momentum or muon")
    return optimizers


def sorted_by_role(model):
    """(hidden matrices, embeddings, other matrices such as heads, vectors) of any module."""
    muon_prefix = getattr(model, "muon_prefix", "")
    hidden, embeddings, outer, vectors = [], [], [], []
    for name, weight in model.named_parameters():
        embeds = isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding)
        if weight.ndim < 2 or name in getattr(model, "undecayed", ()):
            vectors.append(weight)
        elif embeds:
            embeddings.append(weight)
        elif weight.ndim == 2 and name.startswith(muon_prefix):
            hidden.append(weight)
        else:
            outer.append(weight)
    return hidden, embeddings, outer, vectors


def stacked_parts(model: nn.Module) -> dict[Tensor, int]:
    """{weight: number of matrices that are stacked in it} of modules that say so by an attribute
    `muon_parts`, such as the layer of attention's queries, keys and values."""
    return {part.weight: part.muon_parts for part in model.modules() if hasattr(part, "muon_parts")}


class Muon(torch.optim.Optimizer):
    """Momentum with an orthogonalized update (Jordan 2024), as large as AdamW's (Liu et al. 2025),
    like torch.optim.Muon(adjust_lr_fn="match_rms_adamw"). weights: matrices. parts: {weight: number
    of matrices that are stacked in its rows}, each of which is orthogonalized alone; others are
    one."""

    _step_supports_amp_scaling = True  # torch's mark: if found_inf is 1, step() changes nothing

    def __init__(self, weights, lr: float, momentum: float, weight_decay: float, parts=None):
        super().__init__(weights, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.parts = parts or {}

    def __getstate__(self) -> dict:  # for a copy of an optimizer
        return super().__getstate__() | {"parts": self.parts}

    def flops_per_step(self) -> float:
        """FLOPs of orthogonal() for all matrices: the same for every batch."""
        total = 0
        for group in self.param_groups:
            for weight in group["params"]:
                parts = self.parts.get(weight, 1)
                rows, columns = sorted((weight.size(0) // parts, weight.size(1)))
                total += parts * 5 * (4 * rows * rows * columns + 2 * rows**3)
        return total

    @torch.no_grad()
    def step(self) -> None:
        """As torch's fused optimizers do, it obeys `self.found_inf` without waiting for it: both
        outcomes are there, and the device chooses."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight)
                average = state["momentum_buffer"]
                new_average = average.lerp(weight.grad, 1 - group["momentum"])
                nesterov = weight.grad.lerp(new_average, group["momentum"])
                parts = nesterov.chunk(self.parts.get(weight, 1))
                size = 0.2 * group["lr"] * math.sqrt(max(parts[0].shape))
                new_weight = weight * (1 - group["lr"] * group["weight_decay"])
                new_weight.add_(torch.cat([orthogonal(part) for part in parts]), alpha=-size)
                self.keep_or_replace(average, new_average)
                self.keep_or_replace(weight, new_weight)

    def keep_or_replace(self, old, new):
        found_inf = getattr(self, "found_inf", None)
        old.copy_(new if found_inf is None else torch.where(found_inf.bool(), old, new))


def orthogonal(matrix: Tensor) -> Tensor:
    """`matrix` with singular values near 1, by five Newton-Schulz steps (Jordan 2024); in float32
    where a CPU only emulates bfloat16, which takes four to a hundred times as long."""
    x = matrix if emulates_bfloat16(matrix.device) else matrix.bfloat16()
    is_tall = x.size(0) > x.size(1)
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return x.T if is_tall else x


def emulates_bfloat16(device: torch.device) -> bool:
    native = torch.cpu._is_avx512_bf16_supported() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return device.type == "cpu" and not native
