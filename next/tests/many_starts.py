"""Do all processes compute the same bits? On a CPU with several threads one in seven once did not.

    python tests/many_starts.py            # 200 starts, each with the default threads; minutes

Each start computes four shapes of the model: its tables, its first weights, a step (loss, norm,
gradients, weights, moments; AdamW and Muon, float32 and bfloat16), an evaluation, and a set of
element-wise functions of float32 tensors outside fused kernels, which a fork may call. Prints
the hashes that are not alike in all starts; exit code 1 if one of them belongs to a run.
"""

import hashlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
SHAPES = [  # n_embd, n_head, block_size, batch_size
    (128, 4, 64, 32),
    (192, 6, 128, 16),
    (256, 2, 64, 8),
    (64, 2, 33, 12),
]
FUNCTIONS = "cos sin tan exp log sqrt rsqrt tanh sigmoid erf pow reciprocal log2 atan".split()


def hash_of(*tensors):
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().cpu().float().numpy().tobytes())
    return digest.hexdigest()[:12]


def one_start():
    sys.path.insert(0, str(REPO))
    import torch

    from model import build_model
    from optim import configure_optimizer

    torch.set_deterministic_debug_mode("error")
    knobs = {"peak_lr": 1e-2, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "momentum": 0.9}
    found = {}
    for shape in SHAPES:
        names = ("n_embd", "n_head", "block_size")
        config = dict(zip(names, shape, strict=False)) | {"n_layer": 1, "dropout": 0.1}
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(65, (shape[3], shape[2] + 1), generator=generator)
        for optimizer in ("adamw", "muon"):
            for dtype in (torch.float32, torch.bfloat16):
                torch.manual_seed(0)
                model = build_model(config, 65)
                own = configure_optimizer(model, knobs | {"optimizer": optimizer}, "cpu")
                key = f"{shape} {optimizer} {dtype}"
                found[f"{key} start"] = hash_of(model.cos, model.sin, *model.parameters())
                for _ in range(2):
                    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                        loss = model(tokens[:, :-1], tokens[:, 1:])
                    loss.backward()
                    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    gradients = [weight.grad.clone() for weight in model.parameters()]
                    own.step()
                    own.zero_grad()
                state = [x for each in own.state.values() for x in each.values()]
                found[f"{key} step"] = hash_of(loss, norm, *gradients, *model.parameters(), *state)
                model.eval()
                with torch.no_grad():
                    found[f"{key} evaluation"] = hash_of(model(tokens[:, :-1], tokens[:, 1:])[0])
    for size in (63, 64 * 64, 100_000):
        x = torch.rand(size, generator=torch.Generator().manual_seed(2)) * 60 + 1e-3
        for name in FUNCTIONS:
            function = getattr(torch, name)
            result = function(x, 0.7) if name == "pow" else function(x)
            found[f"a fork's own {name}, {size} numbers"] = hash_of(result)
    print(json.dumps(found))


def main(count=200):
    seen = {}
    for _ in range(count):
        done = subprocess.run([sys.executable, __file__, "one"], capture_output=True, text=True)
        for key, digest in json.loads(done.stdout).items():
            seen.setdefault(key, Counter())[digest] += 1
    odd = {key: digests for key, digests in seen.items() if len(digests) > 1}
    for key, digests in odd.items():
        print(f"{key}: {sorted(digests.values(), reverse=True)}")
    of_a_run = [key for key in odd if not key.startswith("a fork")]
    print(f"{count} starts, {len(seen)} hashes each, {len(odd)} differ, of a run {len(of_a_run)}")
    return bool(of_a_run)


if __name__ == "__main__":
    if sys.argv[1:] == ["one"]:
        one_start()
    else:
        sys.exit(main(*map(int, sys.argv[1:])))
