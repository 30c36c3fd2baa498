"""Speed up the start and the exit of a process that compiles nothing."""

import atexit
import contextlib
import gc
import os
import sys

import torch


def speed_up_start_and_exit():
    """Call this after torch is imported and before the first optimizer is made."""
    avoid_dynamo_import()
    atexit.register(gc.freeze)  # else Python searches all of torch for garbage at exit


def avoid_dynamo_import():
    """Keep torch.optim from importing torch._dynamo, which takes about half as long as torch.

    Methods of its optimizers import it on their first call, only to tell the compiler not to trace
    them (torch/_compile.py, torch/optim/optimizer.py). Nothing else that they do changes, unless
    one is differentiable=True: optimizers are not compiled, even if the model is. If they do not
    import it in some version of torch, this does nothing.
    """
    for owner in (torch.optim.Optimizer, *torch.optim.Optimizer.__subclasses__()):
        for name, method in list(vars(owner).items()):
            imports_dynamo = "_dynamo" in getattr(getattr(method, "__code__", None), "co_names", ())
            plain = getattr(method, "__wrapped__", None)
            if imports_dynamo and plain:
                setattr(owner, name, torch.no_grad()(plain) if name == "step" else plain)


def leave(code):
    """Exit with `code`; after a run with ranks, without Python's finalization. While that runs, threads
    of a process group that still wait for Python's lock abort the process, and torchrun with it.
    """
    if "WORLD_SIZE" in os.environ:
        atexit._run_exitfuncs()
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)
