"""How checks measure and say what they find."""

import torch


def said(**numbers):
    """Words for what was found: its names and numbers."""
    return ", ".join(f"{name.replace('_', ' ')} {four_digits(n)}" for name, n in numbers.items())


def four_digits(number):
    if isinstance(number, list | tuple | set):
        return " ".join(map(four_digits, number)) or "none"
    return f"{number:.4g}" if isinstance(number, float) else str(number)


def apart(ours, expected):
    """The norm of the difference of two lists of tensors, over the norm of the second."""
    ours = torch.cat([tensor.double().flatten() for tensor in ours])
    expected = torch.cat([tensor.double().flatten() for tensor in expected])
    size = expected.norm().clamp(min=1e-12)
    return ((ours - expected).norm() / size).item()


def loss_in(out):
    """The loss that a model returns, alone or with other numbers."""
    return out[0] if isinstance(out, tuple) else out


def gradients_of(model):
    return [weight.grad for weight in model.parameters() if weight.grad is not None]
