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
    """
    hidden, outer, vectors = sorted_by_role(model)

    def groups(decayed):
        return [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]

    fused = device_type in ("cpu", "cuda")  # MPS's fused kernels ignore found_inf: no step skipped
    adam = {"lr": lr, "betas": (beta1, beta2), "fused": fused}
    if optimizer == "adamw":
        optimizers = [torch.optim.AdamW(groups(hidden + outer), **adam)]
    elif optimizer == "adam":
        optimizers = [torch.optim.Adam(groups(hidden + outer), **adam)]
    elif optimizer in ("sgd", "momentum"):
        momentum = momentum if optimizer == "momentum" else 0.0
        sharded = any(hasattr(weight, "to_local") for weight in model.parameters())
        fused = fused and not sharded  # there is none for FSDP2's DTensors (torch 2.13)
        sgd = {"lr": lr, "momentum": momentum, "fused": fused}
        optimizers = [torch.optim.SGD(groups(hidden + outer), **sgd)]
    elif optimizer == "muon":
        muon = Muon([{"params": hidden}], lr, momentum, weight_decay)
        optimizers = [muon, torch.optim.AdamW(groups(outer), **adam)]
    else:
        raise ValueError(f"optimizer={optimizer!r}: expected adamw, adam, sgd, momentum or muon")
    for each in optimizers if device_type == "cpu" else ():
        # Adam's look for a CUDA graph makes a CUDA context of some hundred MB where there is a GPU.
        each._accelerator_graph_capture_health_check = lambda: None
    return optimizers


def sorted_by_role(model):
    """(hidden matrices, other matrices and embeddings, vectors) of any module."""
    muon_prefix = getattr(model, "muon_prefix", "")
    hidden, outer, vectors = [], [], []
    for name, weight in model.named_parameters():
        embeds = isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding)
        if weight.ndim < 2 or name in getattr(model, "undecayed", ()):
            vectors.append(weight)
        elif weight.ndim == 2 and not embeds and name.startswith(muon_prefix):
            hidden.append(weight)
        else:
            outer.append(weight)
    return hidden, outer, vectors


class Muon(torch.optim.Optimizer):
    """Momentum with an orthogonalized update (Jordan 2024), as large as AdamW's (Liu et al. 2025), like
    torch.optim.Muon(adjust_lr_fn="match_rms_adamw"). weights: matrices."""

    skips_on_device = True  # step() changes nothing if found_inf, a 0/1 tensor, is 1

    def __init__(self, weights, lr: float, momentum: float, weight_decay: float):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(weights, defaults)

    @torch.no_grad()
    def step(self) -> None:
        """As torch's fused optimizers do, it obeys `self.found_inf` without waiting for it: both
        outcomes are there, and the device chooses."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                if not self.state[weight]:
                    self.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
                average = self.state[weight]["momentum_buffer"]
                new_average = average.lerp(weight.grad, 1 - group["momentum"])
                nesterov = weight.grad.lerp(new_average, group["momentum"])
                new_weight = weight * (1 - group["lr"] * group["weight_decay"])
                size = 0.2 * group["lr"] * math.sqrt(max(weight.shape))
                new_weight.add_(orthogonal(nesterov), alpha=-size)
                self.keep_or_replace(average, new_average)
                self.keep_or_replace(weight, new_weight)

    def keep_or_replace(self, old, new):
        found_inf = getattr(self, "found_inf", None)
        old.copy_(new if found_inf is None else torch.where(found_inf.bool(), old, new))


def orthogonal(matrix: Tensor) -> Tensor:
    """`matrix` with singular values near 1, by five Newton-Schulz steps (Jordan 2024); in float32 where
    a CPU only emulates bfloat16, which takes a hundred times as long."""
    emulated = matrix.is_cpu and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    x = matrix if emulated else matrix.bfloat16()
    x = x.T if x.size(0) > x.size(1) else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return x.T if matrix.size(0) > matrix.size(1) else x
