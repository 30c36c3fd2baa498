"""How weights move: which weight gets which optimizer's rule, and Muon. Imports nothing but torch."""

import math

import torch
from torch import Tensor, nn


def configure_optimizer(model: nn.Module, knobs: dict, device_type: str) -> torch.optim.Optimizer:
    """The one optimizer of `model`, any module.

    knobs["optimizer"]: "adamw" (Loshchilov & Hutter 2019), "adam" (Kingma & Ba 2015; decays through
    the gradient), "sgd", "momentum" (SGD with momentum), or "muon" (Muon for hidden matrices, AdamW
    for the rest). Matrices and embeddings decay, vectors do not. The rate of a group is that of the
    run in the proportion of its own `lr` to `peak_lr`. Raises ValueError for another name.
    """
    name = knobs["optimizer"]
    lr = knobs["peak_lr"]
    hidden, embeddings, outer, vectors = sorted_by_role(model)
    decayed = {"params": hidden + embeddings + outer, "weight_decay": knobs["weight_decay"]}
    undecayed = {"params": vectors, "weight_decay": 0.0}
    # torch's fused kernels skip a step on the device if a gradient is not finite; not those of MPS
    fused = device_type in ("cpu", "cuda")
    adam = {"lr": lr, "betas": (knobs["beta1"], knobs["beta2"]), "fused": fused}
    if name == "adamw":
        return torch.optim.AdamW([decayed, undecayed], **adam)
    if name == "adam":
        return torch.optim.Adam([decayed, undecayed], **adam)
    if name in ("sgd", "momentum"):
        is_sharded = any(hasattr(weight, "to_local") for weight in model.parameters())
        fused = fused and not is_sharded  # there is none for FSDP2's DTensors (torch 2.13)
        momentum = knobs["momentum"] if name == "momentum" else 0.0
        groups = [decayed, undecayed]
        sgd = torch.optim.SGD(groups, lr=lr, momentum=momentum, fused=fused)
        return with_momentum_buffers(sgd)
    if name == "muon":
        groups = [
            {
                "params": hidden,
                "momentum": knobs["momentum"],
                "parts": stacked_parts(model, hidden),
            },
            # an embedding's row learns only where its token stands; the loss is steep in the head
            {"params": embeddings, "lr": 2.0 * lr},
            {"params": outer, "lr": 0.5 * lr},
            undecayed,
        ]
        return with_momentum_buffers(Muon(groups, weight_decay=knobs["weight_decay"], **adam))
    raise ValueError(f"optimizer={name!r}: expected adamw, adam, sgd, momentum or muon")


def sorted_by_role(model: nn.Module) -> tuple[list, list, list, list]:
    """(hidden matrices, embeddings, other matrices such as heads, vectors) of any module. An
    attribute `undecayed` names matrices that count as vectors, `muon_prefix` how the names of
    hidden matrices begin."""
    muon_prefix = getattr(model, "muon_prefix", "")
    hidden, embeddings, outer, vectors = [], [], [], []
    for name, weight in model.named_parameters():
        layer = model.get_submodule(name.rpartition(".")[0])
        if weight.ndim < 2 or name in getattr(model, "undecayed", ()):
            vectors.append(weight)
        elif isinstance(layer, nn.Embedding):
            embeddings.append(weight)
        elif weight.ndim == 2 and name.startswith(muon_prefix):
            hidden.append(weight)
        else:
            outer.append(weight)
    return hidden, embeddings, outer, vectors


def stacked_parts(model: nn.Module, weights: list[Tensor]) -> list[int]:
    """For each weight, how many matrices are stacked in its rows. A module says so by an attribute
    `muon_parts`, such as the layer of attention's queries, keys and values."""
    parts = {}
    for layer in model.modules():
        if hasattr(layer, "muon_parts"):
            parts[id(layer.weight)] = layer.muon_parts
    return [parts.get(id(weight), 1) for weight in weights]


def with_momentum_buffers(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same optimizer, its momentum started at zero: torch would start it with the first
    gradient, which may not be finite."""
    for group in optimizer.param_groups:
        if group.get("momentum"):
            for weight in group["params"]:
                optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    return optimizer


class Muon(torch.optim.AdamW):
    """AdamW, but for groups that have a `momentum`. Their matrices move by momentum with an
    orthogonalized update (Jordan 2024), as large as AdamW's (Liu et al. 2025), like
    torch.optim.Muon(adjust_lr_fn="match_rms_adamw"). The group's `parts` says for each matrix how
    many are stacked in its rows, each of which is orthogonalized alone."""

    def __setstate__(self, state: dict) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's expects its own state everywhere

    def _init_group(self, group: dict, *lists) -> bool:
        """Called by AdamW.step(): fills its lists with a group's weights, here not with Muon's."""
        return False if "momentum" in group else super()._init_group(group, *lists)

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """As torch's fused optimizers, it obeys the `found_inf` of GradScaler without waiting for
        it: both outcomes are computed, and the device chooses."""
        super().step(closure)
        found_inf = getattr(self, "found_inf", None)
        for group in self.param_groups:
            if "momentum" not in group:
                continue
            for weight, parts in zip(group["params"], group["parts"], strict=True):
                if weight.grad is None:
                    continue
                average = self.state[weight]["momentum_buffer"]
                new_average = average.lerp(weight.grad, 1 - group["momentum"])
                update = weight.grad.lerp(new_average, group["momentum"])  # Nesterov's
                update = torch.cat([orthogonal(part) for part in update.chunk(parts)])
                matrix_shape = (weight.size(0) // parts, weight.size(1))
                size = 0.2 * group["lr"] * math.sqrt(max(matrix_shape))
                new_weight = weight * (1 - group["lr"] * group["weight_decay"])
                new_weight.add_(update, alpha=-size)
                replace(average, new_average, found_inf)
                replace(weight, new_weight, found_inf)


def replace(old: Tensor, new: Tensor, found_inf: Tensor | None) -> None:
    """Copy `new` into `old`, unless `found_inf` is 1."""
    if found_inf is not None:
        new = torch.where(found_inf.bool(), old, new)
    old.copy_(new)


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
