"""What would slow the start and the exit of a process that compiles nothing."""

import atexit
import gc

import torch


def speed_up_start_and_exit():
    """To be called once torch is imported, before the first optimizer is made."""
    avoid_dynamo_import()
    atexit.register(gc.freeze)  # or Python searches all of torch for garbage on its way out


def avoid_dynamo_import():
    """Has torch.optim work without torch._dynamo, whose import takes about half as long as that of torch.

    Methods of its optimizers import it at their first call, only to tell the compiler to stay out of
    them (torch/_compile.py, torch/optim/optimizer.py). Nothing else that they do changes, unless one is
    differentiable=True; and where a model is compiled, its optimizer is not. In a torch where they do
    not, nothing happens.
    """
    for owner in (torch.optim.Optimizer, *torch.optim.Optimizer.__subclasses__()):
        for name, method in list(vars(owner).items()):
            imports_dynamo = "_dynamo" in getattr(getattr(method, "__code__", None), "co_names", ())
            plain = getattr(method, "__wrapped__", None)
            if imports_dynamo and plain:
                setattr(owner, name, torch.no_grad()(plain) if name == "step" else plain)
