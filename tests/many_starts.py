"""Do all processes compute the same bits? On a CPU with several threads one in seven once did not.

    python tests/many_starts.py            # 200 starts, each with the default threads; minutes
    python tests/many_starts.py 4 1        # 4 starts, of the first shape alone

Each start computes four shapes of the model: its tables, its first weights, two steps (loss, norm,
gradients, weights, moments; AdamW and Muon, float32 and bfloat16), an evaluation, and a set of
element-wise functions of float32 tensors outside fused kernels, which a fork may call. Prints
the hashes that are not alike in all starts; exit code 1 if one of them belongs to a run."""

import itertools
import json
import subprocess
import sys
from collections import Counter

from conftest import digest

SHAPES = [  # n_embd, n_head, block_size, batch_size
    (128, 4, 64, 32),
    (192, 6, 128, 16),
    (256, 2, 64, 8),
    (64, 2, 33, 12),
]
FUNCTIONS = "cos sin tan exp log sqrt rsqrt tanh sigmoid erf reciprocal log2 atan".split()


def one_start(shapes):
    import torch

    from model import build_model
    from optim import configure_optimizer

    torch.set_deterministic_debug_mode("error")
    knobs = {"peak_lr": 1e-2, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "momentum": 0.9}
    found, dtypes = {}, (torch.float32, torch.bfloat16)
    for shape, optimizer, dtype in itertools.product(SHAPES[:shapes], ("adamw", "muon"), dtypes):
        config = dict(zip(("n_embd", "n_head", "block_size"), shape, strict=False))
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(65, (shape[3], shape[2] + 1), generator=generator)
        torch.manual_seed(0)
        model = build_model(config | {"n_layer": 1, "dropout": 0.1}, 65)
        own = configure_optimizer(model, knobs | {"optimizer": optimizer}, "cpu")
        key = f"{shape} {optimizer} {dtype}"
        found[f"{key} start"] = digest([model.cos, model.sin, *model.parameters()])
        for _ in range(2):
            own.zero_grad()
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            own.step()
        gradients = [weight.grad for weight in model.parameters()]
        parts = [loss, norm, gradients, [*model.parameters()], own.state_dict()["state"]]
        found[f"{key} steps"] = digest(parts)
        with torch.no_grad():
            found[f"{key} evaluation"] = digest(model.eval()(tokens[:, :-1], tokens[:, 1:])[0])
    for size in (63, 64 * 64, 100_000):
        x = torch.rand(size, generator=torch.Generator().manual_seed(2)) * 60 + 1e-3
        for name in FUNCTIONS:
            found[f"a fork's own {name}, {size} numbers"] = digest(getattr(torch, name)(x))
    print(json.dumps(found))


def main(count=200, shapes=4):
    command, seen = [sys.executable, __file__, "one", str(shapes)], {}
    for _ in range(count):
        done = subprocess.run(command, capture_output=True, text=True)
        for key, found in json.loads(done.stdout).items():
            seen.setdefault(key, Counter())[found] += 1
    odd = {key: found for key, found in seen.items() if len(found) > 1}
    for key, found in odd.items():
        print(f"{key}: {sorted(found.values(), reverse=True)}")
    of_a_run = [key for key in odd if not key.startswith("a fork")]
    print(f"{count} starts, {len(seen)} hashes each, {len(odd)} differ, of a run {len(of_a_run)}")
    return bool(of_a_run)


if __name__ == "__main__":
    is_one = sys.argv[1:2] == ["one"]
    sys.exit(one_start(int(sys.argv[2])) if is_one else main(*map(int, sys.argv[1:])))
