"""The command line: a script's knobs, from its globals, config files and flags; how a script fails.

A knob is a lower-case name that a script sets to a plain str, int, float or bool above its first
function or class; its default gives its type. A *_dir is a path: of a flag, relative to the working
directory, else to the repository. The comment beside it, which goes on in lines that begin with `#`
and two spaces, is its help. An interval in it, such as [1, inf), and choices, a | b, are enforced.
A config file is executed as Python, sees the knobs as set so far, and may assign knobs and _names.
"""

import ast
import builtins
import difflib
import math
import os
import re
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from glob import glob
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from symtable import symtable
from typing import Any, NoReturn

AUTO_OR_BOOL = ("compile", "deterministic")
BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
NAME = re.compile("[a-z][a-z0-9_]*")  # of a knob
INTERVAL = re.compile(r"([\[(])(-?[\d.e]+), (-?[\d.e]+|inf)([\])])")
CHOICES = re.compile(r"\w+(?: \| \w+)+")
NANOGPT_NAMES = {  # nanoGPT's name: the name here, or what to type instead
    "always_save_checkpoint": "--save_interval=N saves whatever the loss is; best.pt is separate",
    "backend": "--device decides it: nccl for cuda, gloo for cpu",
    "bias": "no counterpart: none of the --n_layer layers has a bias",
    "decay_lr": "--schedule=cosine decays the rate, --schedule=constant does not",
    "eval_iters": "--eval_tokens=N evaluates the first N tokens, --eval_tokens=0 all of them",
    "eval_only": "no counterpart: every run also evaluates before its first step (--eval_interval)",
    "gradient_accumulation_steps": "accum_steps",
    "init_from": "--resume takes auto, never, restart or a checkpoint's path; GPT-2's do not fit",
    "learning_rate": "peak_lr",
    "lr_decay_iters": "decay_steps",
    "max_iters": "max_steps",
    "warmup_iters": "warmup_steps",
}
ARITHMETIC = (ast.Constant, ast.UnaryOp, ast.BinOp, ast.unaryop, ast.operator)
COMPILER = ("torch._dynamo", "torch._inductor")
NOT_OWN = (  # in the path of a file that is not the user's own code
    os.path.dirname(os.path.abspath(__file__)) + "/",
    os.path.dirname(os.__file__) + "/",  # the standard library
    *("-packages/", "<frozen", "<eval_with_key", "torchinductor"),
)


class BadInput(Exception):
    """Bad input: one line on what was found, expected, and what to type. Exit code 2."""


class RunFailed(Exception):
    """The run cannot continue: one line on what happened and what to do next. Exit code 1."""


def fail(message: object) -> NoReturn:
    raise BadInput(" ".join(str(message).splitlines()))


def run_script(main: Callable[[], int | None]) -> int:
    """Call main() and return the exit code. An error of ours is one line on stderr, any other a
    traceback; a closed pipe, as by `| head`, or a full disk is none."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.reconfigure(errors="backslashreplace")  # for a terminal that lacks a character
    code, words = 0, ""
    try:
        code = main() or 0
    except KeyboardInterrupt:
        code, words = 130, "\n"
    except BrokenPipeError:
        pass
    except (BadInput, RunFailed) as error:
        code = 2 if isinstance(error, BadInput) else 1
        if not getattr(error, "said", False):  # by another rank
            words = f"{os.path.basename(sys.argv[0])}: {'failed: ' * (code == 1)}{error}\n"
    except Exception as error:
        error.__traceback__ = error.__traceback__.tb_next  # without this function
        code, words = 1, folded_traceback(error)
    try:
        print(end=printable(words), file=sys.stderr, flush=True)
        print(end="", flush=True)
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python complains at its exit
    return code


def printable(text: str) -> str:
    """Without control characters, with which a model or a file could type into the terminal, or write
    backwards; newlines and tabs stay."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", "", text)


def folded_traceback(error: BaseException) -> str:
    """A traceback with the user's own frames; what lies in plumbing/ and libraries between them is one
    line. Of torch's compiler, the error that it met in the user's code."""
    frames = list(traceback.extract_tb(error.__traceback__))
    words = "".join(traceback.format_exception_only(error)).rstrip()
    if type(error).__module__.startswith(COMPILER):  # it knows that place, and quotes that error
        frames += getattr(error, "real_stack", None) or []
        met = re.search(r" got (\w+)\((['\"])(.*)\2\)$", words, re.MULTILINE)
        words = f"{met[1]}: {met[3]}" if met else words.partition("\n\n")[0]
    text = "Traceback (most recent call last):\n"
    for own, group in groupby(frames, lambda f: not any(part in f.filename for part in NOT_OWN)):
        *above, last = group
        place = f"{os.path.basename(last.filename)}:{last.lineno}"
        folded = f"  ... frames in plumbing/ and libraries: {len(above) + 1}, to {place} ...\n"
        text += "".join(traceback.format_list([*above, last])) if own else folded
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause and not type(cause).__module__.startswith(COMPILER):  # then eager was tried
        text = f"{folded_traceback(cause)}\nwhich led to:\n\n{text}"
    return f"{text}{words}\n"


class Config(dict):
    """Every knob and its value. flags: names that flags set. base: values without flags, as written.
    origins: name -> "flag", or the config file that set it."""


@contextmanager
def configured(*scopes: dict, argv: list | None = None, names: list | None = None) -> Iterator:
    """Set the knobs of `scopes`, globals() of scripts, from `argv`, yield a Config, give them back.

    Raises BadInput, and sets none, if any argument is invalid. Present values are the defaults, so that
    `train.max_steps = 5` takes effect. A later scope may restate a knob: both then hold one value.
    names: a list to which arguments other than flags and config files are added; None refuses them.
    """
    argv = sys.argv[1:] if argv is None else argv
    repository = os.path.dirname(os.path.abspath(scopes[0]["__file__"]))
    owned = [(scope, knobs_of(scope)) for scope in scopes]
    knobs = {name: knob for _, own in owned for name, knob in own.items()}
    config = Config({name: default for name, (default, _, _) in knobs.items()})
    config.flags, config.base = set(), dict(config)
    config.origins = {}
    for argument in argv:
        if argument in ("-h", "--help"):
            continue
        if argument.startswith("-"):
            name, equals, value = argument.removeprefix("--").partition("=")
            if name in knobs and not equals:
                fail(f"{argument} has no value; write it as in --{name}={show(config[name])}")
            config[name] = accept(name, value, argument, knobs)
            config.flags.add(name)
            config.origins[name] = "flag"
        elif argument.endswith(".py"):
            settings = read_config_file(argument, repository, config, knobs)
            config |= settings
            config.base |= settings
            config.flags -= settings.keys()
            config.origins |= dict.fromkeys(settings, argument)
        elif names is None:
            fail(f"unexpected argument {argument!r}; write config/FILE.py or --key=value")
        else:
            names.append(argument)
    if "-h" in argv or "--help" in argv:
        print_help(scopes[-1], config, knobs, takes_names=names is not None)
        raise SystemExit(0)
    for name, path in config.items():
        if name.endswith("_dir") and path:
            folder = os.getcwd() if name in config.flags else repository
            config[name] = os.path.normpath(os.path.join(folder, os.path.expanduser(path)))
    before = [(scope, {name: scope[name] for name in own}) for scope, own in owned]
    try:
        for scope, own in owned:
            scope.update({name: config[name] for name in own})
        yield config
    finally:
        for scope, values in before:
            scope.update(values)


def folder_name(config: Config, named: Collection[str] | None = None) -> str:
    """The out_dir that was typed; else the config's and, in the order of the knobs, those flags in
    `named` (None: all) that change a value (of a batch's two factors: their product):
    out/mine,n_layer=2."""
    if "out_dir" in config.flags:
        return config["out_dir"]
    named = config if named is None else named
    factors = {"batch_size", "accum_steps"} & config.keys()
    typed = {key for key in config.flags & {*named} if config[key] != config.base[key]} - factors
    if math.prod(config[key] for key in factors) != math.prod(config.base[key] for key in factors):
        typed |= factors
    parent, name = os.path.split(config["out_dir"])
    for key in filter(typed.__contains__, config):
        value = re.sub(r"[^\w.+-]", lambda match: f"%{ord(match[0]):02X}", show(config[key]))
        name += f",{key}={value}"
    if len(name) > 120:
        name = f"{name[:107]},{sha256(name.encode()).hexdigest()[:12]}"
    return os.path.join(parent, name)


def read_knobs(path: str | Path) -> dict[str, tuple[Any, str, str]]:
    """{name: (default, comment, heading)} of the knobs in the script at `path`, in order. The heading
    is the full-line comments above a group of knobs."""
    source = Path(path).read_text(encoding="utf-8")
    lines = source.splitlines()
    knobs, heading = {}, ""
    end = 0  # the number of the last line that belongs to a knob or a statement
    for node in ast.parse(source).body:
        above = [line.strip("#-= ") for line in lines[end : node.lineno - 1] if line[:1] == "#"]
        end, default = node.end_lineno, None
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                break
            case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(ast.Name(name), _, value):
                parts = ast.walk(value or node)  # x: int has no value
                if NAME.fullmatch(name) and all(isinstance(part, ARITHMETIC) for part in parts):
                    default = eval(compile(ast.Expression(value), "", "eval"))  # such as 5 * 8
        if isinstance(default, str | int | float):
            heading = " ".join(above) or heading
            comment = lines[end - 1][node.end_col_offset :].strip("# ")
            while end < len(lines) and lines[end].startswith("#  "):
                comment += " " + lines[end].strip("# ")
                end += 1
            knobs[name] = default, comment, heading
    return knobs


def knobs_of(scope: dict[str, Any]) -> dict[str, tuple[Any, str, str]]:
    """read_knobs() with present values as defaults. Raises BadInput for a plain global that is not in
    the source, such as train.max_step = 5: it would do nothing, in silence."""
    path = Path(scope["__file__"])
    knobs = read_knobs(path)
    source = path.read_text(encoding="utf-8")
    defined = scope if "import *" in source else symtable(source, "", "exec").get_identifiers()
    for name in filter(NAME.fullmatch, scope.keys() - defined):
        if type(scope[name]) in (str, int, float, bool):
            accept(name, scope[name], f"{path.stem}.{name} = {scope[name]!r}", knobs)
    return {
        name: (accept(name, scope[name], f"{name} = {scope[name]!r}", knobs), *words)
        for name, (_, *words) in knobs.items()
    }


def read_config_file(argument: str, repository: str, config: dict, knobs: dict) -> dict[str, Any]:
    """{name: value} that a config file, in the working directory or the repository, assigns."""
    path = next(filter(os.path.isfile, (argument, os.path.join(repository, argument))), None)
    if path is None:
        known = ", ".join(sorted(glob("config/*.py", root_dir=repository)))
        fail(f"no config file {argument} here or in {repository}; there are: {known or 'none'}")
    assigned = {"__builtins__": vars(builtins) | config}  # knobs are visible as builtins
    try:
        exec(compile(Path(path).read_bytes(), argument, "exec"), assigned)
    except Exception as error:  # whatever the file does
        place = error.__traceback__.tb_next  # None if the file cannot be compiled
        line = getattr(error, "lineno", None) or (place.tb_lineno if place else 1)
        fail(f"{argument}:{line}: {getattr(error, 'msg', error)}")
    return {
        name: accept(name, value, f"{argument}: {name} = {value!r}", knobs)
        for name, value in assigned.items()
        if not name.startswith("_")
    }


def accept(name: str, value: Any, written: str, knobs: dict) -> Any:
    """`value` as the knob's type; BadInput quotes `written`, the flag, or the file and assignment."""
    is_flag = written.startswith("-")
    if name not in knobs:
        fail(f"unknown name {name!r} in {written}; {hint_for(name, value, knobs, is_flag)}")
    default, comment, _ = knobs[name]
    choices, interval = CHOICES.search(comment), INTERVAL.search(comment)
    words = choices[0].split(" | ") if choices else ["true", "false"] * isinstance(default, bool)
    words = ["auto", "true", "false"] if name in AUTO_OR_BOOL else words
    if words:
        expected = "one of " + ", ".join(words)
        text = show(value).lower()
        value = BOOLEANS.get(text, text) if "true" in words else value
        fits = show(value) in words
    elif isinstance(default, str):
        is_folder = default and name.endswith("_dir")
        expected = "a folder" if is_folder else "a string in quotes"
        fits = isinstance(value, str) and (value or not is_folder)
    else:
        expected = "an int" if isinstance(default, int) else "a number"
        number = math.nan
        with suppress(ValueError):
            number = float(show(value)) if isinstance(value, str) == is_flag else math.nan
        fits = not math.isnan(number)
        if isinstance(default, int):
            fits = number.is_integer() and abs(number) < 2**63  # tensors and files hold no other
        if interval:
            expected += f" in {interval[0]}"
            low, high = float(interval[2]), float(interval[3])
            edges = [low] * (interval[1] == "[") + [high] * (interval[4] == "]")
            fits = fits and (low < number < high or number in edges)
        value = type(default)(number) if fits else None
    if not fits:
        fail(f"{written}: expected {expected} such as {to_type(name, default, is_flag)}")
    return value


def show(value: Any) -> str:
    """A knob's value as it is typed."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def to_type(name: str, value: Any, is_flag: bool) -> str:
    return f"--{name}={show(value)}" if is_flag else f"{name} = {value!r}"


def hint_for(name: str, value: Any, knobs: dict, is_flag: bool) -> str:
    """What to write instead of an unknown `name`."""
    there = NANOGPT_NAMES.get(name, "")
    if there in knobs:
        return f"here it is {to_type(there, value, is_flag)}"
    if " " in there and knobs.keys() >= set(re.findall(r"--(\w+)", there)):
        return there
    for near in difflib.get_close_matches(name.lower(), knobs, n=1):
        return f"did you mean {to_type(near, value, is_flag)}?"
    return "--help lists every name"


def print_help(scope: dict[str, Any], config: Config, knobs: dict, takes_names: bool) -> None:
    """Print the start of a script's docstring, its usage, and its knobs with the values that the other
    arguments give them. Wraps at the width of the terminal."""
    width = min(100, max(40, shutil.get_terminal_size((100, 24)).columns))
    indent = 32 if width >= 80 else 8
    usage = f"usage: python {os.path.basename(scope['__file__'])}"
    if takes_names:
        usage += " NAME ..."
    lines = [(scope.get("__doc__") or "").strip().split("\n\n")[0], ""]
    lines += [f"{usage} [config/FILE.py ...] [--key=value ...]"]
    lines += ["(a config file is Python, and is executed; later arguments win)"]
    if config.origins and "out_dir" in config:
        lines += ["", f"With these arguments the folder is {folder_name(config)}"]
    for heading, group in groupby(knobs.items(), lambda item: item[1][2]):
        lines += ["\n" + textwrap.fill(heading or "More", width)]
        for name, (default, comment, _) in group:
            if name in config.origins:
                comment = f"({config.origins[name]}; default {show(default)}) {comment}"
            line = f"{f'  --{name}={show(config[name])}':<{indent - 2}}  {comment}".rstrip()
            lines += [textwrap.fill(line, width, subsequent_indent=" " * indent)]
    print("\n".join(lines), flush=True)
