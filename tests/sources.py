"""Source that a run executes before train.main(): run_train's `before`. In it the names train,
plumbing, torch, np, rank (of this process) and a few modules of Python are known. At the end stand
whole scripts, as a person writes them beside train.py."""

import textwrap
from pathlib import Path


def around(name, first="pass", then="pass"):
    """Source that runs `first` before and `then` after each call of train.NAME. There, `args` are
    its arguments, `run` is the run among them, and `result` what it returned, and returns."""
    return f"""
def wrap(inner):
    def call(*args, **options):
        run = next((each for each in args if isinstance(each, train.Run)), None)
{textwrap.indent(textwrap.dedent(first), " " * 8)}
        result = inner(*args, **options)
{textwrap.indent(textwrap.dedent(then), " " * 8)}
        return result
    return call
train.{name} = wrap(train.{name})
"""


WAIT_FOR_SAVE = """
import threading
for each in threading.enumerate():
    if each is not threading.current_thread() and not each.daemon:
        each.join()
"""


def at_step(step, code):
    """Source that runs `code` in that step, before it is computed and with no save under way."""
    code = textwrap.indent(WAIT_FOR_SAVE + textwrap.dedent(code), " " * 4)
    return around("train_step", f"if run.state['step'] == {step} - 1:\n{code}")


def in_evaluation(step, code):
    """Source that runs `code` as the evaluation after that step reads a batch, with no save under
    way."""
    code = textwrap.indent(WAIT_FOR_SAVE + textwrap.dedent(code), " " * 4)
    due = f"run.state['step'] == {step} and not torch.is_grad_enabled()"
    return around("batch_at", f"if {due}:\n{code}")


def stop_at(step, name="SIGTERM"):
    """Source of a process that sends itself the signal in that step."""
    return at_step(step, f"os.kill(os.getpid(), signal.{name})")


def script(name):
    """Source that imports tests/NAME.py."""
    folder, _, module = name.rpartition("/")
    path = Path(__file__).with_name(folder)
    return f"import sys, train; sys.path.insert(0, '{path}'); import {module}\n"


def loading(path):
    """Source that makes the script at `path` that of the run."""
    words = f"import pathlib, sys; sys.path.insert(0, {str(path.parent)!r})"
    return f"{words}\nplumbing.script = pathlib.Path({str(path)!r})\nimport {path.stem}\n"


def on_rank(rank, source):
    return f"if rank == {rank}:\n{textwrap.indent(source, '    ')}\n"


# ---- scripts of forks -----------------------------------------------------------------------------

END = """
if __name__ == "__main__":
    train.main()
"""

# A Dataset of rows, whose noise is drawn while they are read.
AUGMENTED = script("sound/data_augmented") + END

SEVERAL_SETS = f"""
import train


def open_dataset(saved, inner=train.open_dataset):
    train_data, val_data, facts = inner(saved)
    start = train.OrderedWindows(train_data.tokens, train.block_size, 200)
    return train_data, {{"end": val_data, "start": start}}, facts


train.open_dataset = open_dataset
{END}"""

# A knob, and a second optimizer of its own, whose state goes into the checkpoints.
KNOB = f"""
import torch

import train

train.knob("alpha", 0.01, "weight of the square of the head's scale")
scale = torch.ones(1, requires_grad=True)


def train_step(run, inputs, targets, lr, inner=train.train_step):
    if "scale" not in run.extra:
        run.extra["scale"] = torch.optim.Adam([scale], lr=0.01)
        run.extra["value"] = torch.nn.ParameterList([scale])
    numbers = inner(run, inputs, targets, lr)
    optimizer = run.extra["scale"]
    optimizer.zero_grad()
    (train.alpha * scale.square() * numbers["loss"].detach()).sum().backward()
    optimizer.step()
    with torch.no_grad():
        run.model.head.weight.mul_(1 - train.alpha * (1 - scale))
    return numbers | {{"scale": scale.detach().clone()}}


train.train_step = train_step
{END}"""
