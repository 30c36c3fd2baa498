"""
Override a script's knobs by config files and flags; later ones win:

    python train.py config/FILE.py --batch_size=32 --out_dir=out/mine

A config file is executed as Python, and may compute with the knobs as set so far. Every name it
assigns must be a knob, unless it begins with _. A relative path (*_dir) in a flag starts from the
working directory; one in a config file, or a default, from the repository.
"""

import builtins
import difflib
import os
import re
import sys
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from traceback import extract_tb

from plumbing.knobs import AUTO_OR_BOOL, convert, print_help, read_knobs, show

NANOGPT = {  # nanoGPT's name: the name here, or what to type instead
    "always_save_checkpoint": "--save_interval=N saves whatever the loss is; best.pt is separate",
    "backend": "--device decides it: nccl for cuda, gloo for cpu",
    "bias": "no counterpart: none of the --n_layer layers has a bias",
    "decay_lr": "--schedule=cosine decays the rate, --schedule=constant does not",
    "eval_iters": "--eval_tokens=N evaluates the first N tokens, --eval_tokens=0 all of them",
    "eval_only": "no counterpart: every run also evaluates before its first step (--eval_interval)",
    "gradient_accumulation_steps": "accum_steps",
    "init_from": "--resume takes auto, never or a checkpoint's path; GPT-2's weights do not fit",
    "learning_rate": "peak_lr",
    "lr_decay_iters": "decay_steps",
    "max_iters": "max_steps",
    "warmup_iters": "warmup_steps",
}

script = ""  # name of the script configured last; in a notebook, sys.argv does not have it


def fail(message):
    """Bad input: one line on stderr, exit code 2."""
    line = " ".join(str(message).splitlines())
    print(f"{script or os.path.basename(sys.argv[0])}: {line}", file=sys.stderr)
    raise SystemExit(2)


class Config(dict):
    """Every knob and its value. flags: the names whose value a flag gave."""

    flags: set


@contextmanager
def configured(*scopes, argv=None, names=None):
    """
    Set the knobs of `scopes` from `argv` (default: the command line). If any of it is invalid, set
    none and fail(). Yields a Config. Restores the knobs on exit.

    scopes: globals() of a script or vars() of a module. A later one may declare a knob of an
        earlier one again, to change its default; both then hold the same value.
    names: a list to which arguments other than flags and config files are added; None refuses them.
    """
    global script
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not in a notebook
            stream.reconfigure(errors="backslashreplace")  # for a terminal that lacks a character
    script = os.path.basename(scopes[-1]["__file__"])
    argv = sys.argv[1:] if argv is None else argv
    repository = os.path.dirname(os.path.abspath(scopes[0]["__file__"]))
    owned = [(scope, knobs_of(scope)) for scope in scopes]
    knobs = {name: knob for _, own in owned for name, knob in own.items()}
    if "-h" in argv or "--help" in argv:
        print_help(script, scopes[-1].get("__doc__"), knobs, takes_names=names is not None)
        raise SystemExit(0)

    config = Config({name: default for name, (default, _, _) in knobs.items()})
    config.flags = set()
    for i, argument in enumerate(argv):
        if argument.startswith("-"):
            name, value = read_flag(argument, argv[i + 1 :], knobs)
            config[name] = value
            config.flags.add(name)
        elif argument.endswith(".py"):
            settings = read_config_file(argument, repository, config, knobs)
            config |= settings
            config.flags -= settings.keys()
        elif names is None:
            fail(f"unexpected argument {argument!r}; write config/FILE.py or --key=value")
        else:
            names.append(argument)
    for name, path in config.items():
        if name.endswith("_dir") and path:
            folder = os.getcwd() if name in config.flags else repository
            config[name] = os.path.normpath(os.path.join(folder, os.path.expanduser(path)))

    before = [{name: scope[name] for name in own} for scope, own in owned]
    try:
        for scope, own in owned:
            scope.update({name: config[name] for name in own})
        yield config
    finally:
        for scope, values in zip(scopes, before, strict=True):
            scope.update(values)


def knobs_of(scope):
    """read_knobs(), with present values as defaults, so that `train.max_steps = 5` takes effect."""
    knobs = read_knobs(scope["__file__"])
    for name, (_, comment, heading) in knobs.items():
        written = f"{name} = {scope[name]!r}"
        knobs[name] = accept(name, scope[name], written, knobs), comment, heading
    return knobs


def read_flag(argument, following, knobs):
    """(name, value) of a flag --name=value."""
    name, equals, text = argument.removeprefix("--").partition("=")
    if name in knobs and not equals:
        default = knobs[name][0]
        example = "true" if isinstance(default, bool) or name in AUTO_OR_BOOL else default
        if following and not following[0].startswith("-") and not following[0].endswith(".py"):
            example = following[0]
        fail(f"{argument} has no value; write {setting(name, example, is_flag=True)}")
    return name, accept(name, text, argument, knobs, is_flag=True)


def read_config_file(argument, repository, config, knobs):
    """{name: value} that a config file, in the working directory or the repository, assigns."""
    path = next(filter(os.path.isfile, (argument, os.path.join(repository, argument))), None)
    if path is None:
        known = ", ".join(sorted(glob("config/*.py", root_dir=repository)))
        looked = " or ".join(dict.fromkeys((os.getcwd(), repository)))
        fail(f"no config file {argument} in {looked}; there are: {known or 'none'}")
    assigned = {"__builtins__": vars(builtins) | config}  # knobs are visible as builtins
    try:
        exec(compile(Path(path).read_bytes(), argument, "exec"), assigned)
    except Exception as error:  # whatever the file does
        frames = extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == argument]
        line = getattr(error, "lineno", None) or (lines or [1])[0]
        fail(f"{argument}:{line}: {getattr(error, 'msg', error)}")
    return {
        name: accept(name, value, f"{argument}: {name} = {value!r}", knobs)
        for name, value in assigned.items()
        if not name.startswith("_")
    }


def setting(name, value, is_flag):
    """How to write a knob and its value, on the command line or in a file."""
    return f"--{name}={show(value)}" if is_flag else f"{name} = {value!r}"


def accept(name, value, written, knobs, is_flag=False):
    """`value` converted to the knob's type; if that is impossible, fail()s and quotes `written`."""
    if name not in knobs:
        fail(f"unknown name {name!r} in {written}; {hint_for(name, value, knobs, is_flag)}")
    default, comment, _ = knobs[name]
    try:
        return convert(name, value, default, comment, is_text=is_flag)
    except ValueError as error:
        fail(f"{written}: expected {error} such as {setting(name, default, is_flag)}")


def hint_for(name, value, knobs, is_flag):
    """What to write instead of an unknown `name`."""
    there = NANOGPT.get(name, "")
    if there in knobs:
        return f"here it is {setting(there, value, is_flag)}"
    if " " in there and knobs.keys() >= set(re.findall(r"--(\w+)", there)):
        return there
    near = difflib.get_close_matches(name.lower(), knobs, n=1)
    if near:
        return f"did you mean {setting(near[0], value, is_flag)}?"
    return "--help lists every name"
