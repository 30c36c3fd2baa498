"""Source that a run executes before train.main(), in scope_of(train): run_train's `before`."""

import math
import os
import signal
import textwrap
import time

import torch


def scope_of(train):
    """What such a source may use without an import."""
    known = {"math": math, "os": os, "signal": signal, "time": time, "torch": torch}
    return {"train": train, **known}


def around(name, first="pass", then="pass"):
    """Source that runs `first` before and `then` after each call of train.NAME. There, `args` are
    its arguments, `run` is the run among them, and `result` what it returned, and returns."""
    return f"""
def wrap(inner):
    def call(*args, **more):
        run = next((each for each in args if isinstance(each, train.Run)), None)
{textwrap.indent(textwrap.dedent(first), " " * 8)}
        result = inner(*args, **more)
{textwrap.indent(textwrap.dedent(then), " " * 8)}
        return result
    return call
train.{name} = wrap(train.{name})
"""


def at_step(step, code):
    """Source that runs `code` just before that step is computed."""
    code = textwrap.indent(textwrap.dedent(code), " " * 4)
    return around("train_step", f"if run.state['step'] == {step} - 1:\n{code}")


# Source for at_step: waits until no save is under way, so that what a kill leaves is no chance.
SAVED = """
import threading
[each.join() for each in threading.enumerate() if each.name == "writer"]
"""


def stop_at(step, name="SIGTERM"):
    """Source of a process that sends itself the signal as that step begins, with no save under
    way."""
    return "import os, signal" + at_step(step, f"{SAVED}os.kill(os.getpid(), signal.{name})")


def bad_batches(indices, how="loss * float('nan')"):
    """Source: on the batches of these indices the loss, or with how="grad = ..." the gradient, is
    bad. Not in the warm-up pass, without batches: a run whose first loss is NaN does not start."""
    change = "result['loss'] = " + how.replace("loss", "result['loss']")
    if how.startswith("grad"):
        change = f"for w in run.model.parameters(): w.{how}"
    is_bad = f'run.batches and run.state["sequences"] // train.sequences_at(0) in {indices}'
    return around("forward_backward", then=f"if {is_bad}:\n    {change}")


# Source of a fork whose model, train_step() and evaluate() log milliseconds.
MEASURED = (
    """
def take_time(model):
    def forward(inputs, targets=None, self=model, inner=model.forward):
        ms = {"model_ms": torch.tensor(time.time() % 1000)}
        if targets is None:
            return inner(inputs)
        result = inner(inputs, targets)
        return (result, ms) if self.training else (result[0], result[1] | ms)
    model.forward = forward
"""
    + around("build_model", then="take_time(result)")
    + around("train_step", then="result['step_ms_of_mine'] = time.time() % 1000")
    + around("evaluate", then="result['eval_ms'] = time.time() % 1000")
)

# Source of a fork whose training data draws random numbers of every kind.
AUGMENTED = """
import random
import numpy as np
def noisy(self, place, inner=train.ShuffledWindows.__getitem__):
    x, y = inner(self, place)
    x[np.random.rand(*x.shape) < 0.1] = random.randrange(20)
    return np.where(torch.rand(x.shape).numpy() < 0.1, 1, x), y
train.ShuffledWindows.__getitem__ = noisy
"""


def ranks(count, code=""):
    """Source for run_train's `before`: `count` ranks; each runs `code`, knowing its `rank`."""
    return f"""
import socket
def spread(main):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE="{count}")
    others = []
    for rank in reversed(range({count})):
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        if rank:
            others.append(os.fork())
            if others[-1] == 0:
                return rank, main
    def and_wait():
        code = train.cli.run_script(main)
        codes = [os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) for other in reversed(others)]
        print("CODES", code, *codes, flush=True)
        return code
    return 0, and_wait
rank, train.main = spread(train.main)
torch.set_num_threads(1)  # after the fork: docs/scaling.md, "Invalid thread pool!"
def weights_and_moments(run):
    states = (state for optimizer in run.optimizers for state in optimizer.state.values())
    return [*run.model.parameters(), *(moment for state in states for moment in state.values())]
{code}
"""


def only_on(rank, source):
    return f"if rank == {rank}:\n{textwrap.indent(source, '    ')}"


SHARD = "--shard=true"

# Root may write (1) and read (2) anywhere, unless it gives these capabilities up.
WITHOUT_OVERRIDE = """
import ctypes
libc = ctypes.CDLL(None)
header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(header, data) == 0
data[0] &= ~(1 << 1 | 1 << 2)
assert libc.capset(header, data) == 0
"""

LION = """
class Lion(torch.optim.Optimizer):
    # Chen et al. 2023, by hand. It keeps what torch's own optimizers do not: a counter in
    # param_groups, an int, a str and another dtype in the state of a weight, and something under no
    # weight at all.
    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr, "count": 0})
    @torch.no_grad()
    def step(self):
        self.state["all"]["steps"] = self.state["all"].get("steps", 0) + 1
        for group in self.param_groups:
            group["count"] += 1
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state.update(n=0, word="a", m=torch.zeros_like(weight, dtype=torch.float64))
                state["n"] += 1
                state["word"] = chr(97 + (ord(state["word"]) - 96) % 26)
                update = torch.lerp(state["m"], weight.grad.double(), 0.1).sign().float()
                rate = group["lr"] / group["count"] / state["n"] * ord(state["word"]) / 97
                weight.mul_(1 - rate * group["weight_decay"]).sub_(update, alpha=rate)
                state["m"].lerp_(weight.grad.double(), 1 / (1 + self.state["all"]["steps"]))
def configure_optimizers(model, name, lr, weight_decay, *rest):
    return [Lion([{"params": list(model.parameters()), "weight_decay": weight_decay}], lr)]
train.configure_optimizers = configure_optimizers
"""
