"""The state of every random number generator, in a form that torch.load(weights_only=True) reads."""

import random

import numpy as np
import torch


def seed_everything(seed):
    """Seed Python, NumPy, and torch on every device (CUDA as soon as it is initialized)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def torch_rng_state(device):
    """torch's state: {"torch": uint8 tensor for the CPU, "device": for an accelerator, or None}."""
    on_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state()
    return {"torch": torch.get_rng_state(), "device": on_device}


def set_torch_rng_state(rng, device):
    """Set torch's state; that of an accelerator only if it is of the same kind as `device`."""
    torch.set_rng_state(rng["torch"])
    here = torch_rng_state(device)["device"]
    if here is not None and rng["device"] is not None and len(here) == len(rng["device"]):
        torch.get_device_module(device).set_rng_state(rng["device"])


def rng_state(device):
    """The state that every later random number depends on.

    NumPy's own array would not load under weights_only=True, so its 624 words become an int64 tensor.
    """
    name, words, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(words.astype(np.int64)), *rest],
        **torch_rng_state(device),
    }


def set_rng_state(rng, device):
    random.setstate(rng["python"])
    name, words, *rest = rng["numpy"]
    np.random.set_state((name, words.numpy().astype(np.uint32), *rest))
    set_torch_rng_state(rng, device)
