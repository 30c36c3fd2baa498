"""The command line: a script's knobs, from its globals, config files and flags; how a script fails.

A knob is a lower-case name that a script sets to a plain str, int, float or bool above its first
function or class; its default gives its type. A *_dir is a path: of a flag, relative to the working
directory, else to the repository. The comment beside it, which goes on in lines that begin with `#`
and two spaces, is its help. An interval in it, such as [1, inf), and choices, a | b, are enforced.
Its last word, after a semicolon, says what the knob may do: see POLICY. No word: the course of the
run. A config file is executed as Python, sees the knobs as set so far, and may assign knobs and
_names."""

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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from glob import glob
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from symtable import symtable
from typing import Any, NoReturn

POLICY = {  # the word in which a comment may end
    "fixed": "another value is another run: it names the folder, and a resume with it is refused",
    "free": "how the run computes, or what it writes: it names no folder",
}
NO_WORD = "the course of the run: it names the folder, and a resume goes on with another value"
BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
NAME = re.compile("[a-z][a-z0-9_]*")  # of a knob
WORD = re.compile(rf"; ({'|'.join(POLICY)})$")
INTERVAL = re.compile(r"([\[(])(-?[\d.e]+), ?(-?[\d.e]+|inf)([\])])")
CHOICES = re.compile(r"\w+(?: \| \w+)+")
GONE = "gone since 2026-11-25"
NAMES_ELSEWHERE = {  # nanoGPT's name, or one that is gone: the name here, or what to type instead
    "always_save_checkpoint": "--save_interval=N saves whatever the loss is; best.pt is separate",
    "backend": "--device decides it: nccl for cuda, gloo for cpu",
    "bias": "no counterpart: none of the --n_layer layers has a bias",
    "decay_lr": "--schedule=cosine decays the rate, --schedule=constant does not",
    "dollars_per_hour": f"{GONE}: report.py gives device-hours",
    "eval_iters": "--eval_tokens=N evaluates the first N tokens, --eval_tokens=0 all of them",
    "eval_only": "no counterpart: every run also evaluates before its first step (--eval_interval)",
    "gradient_accumulation_steps": "accum_steps",
    "hang_minutes": f"{GONE}: HANG_MINUTES in plumbing/ranks.py",
    "init_from": "--resume takes auto, never, restart or a checkpoint's path; GPT-2's do not fit",
    "learning_rate": "peak_lr",
    "lr_decay_iters": "decay_steps",
    "max_iters": "max_steps",
    "max_rollbacks": f"{GONE}: MOST_ROLLBACKS in train.py",
    "max_skipped": f"{GONE}: MOST_SKIPPED in train.py",
    "n_future_tokens": f"{GONE}: it showed no gain; --ngram_rows and --conv_width do",
    "offline_dataset": f"{GONE}: --dataset=pydoc needs no network",
    "offload": f"{GONE}: a smaller --batch_size or --grad_checkpoint=true needs less memory",
    "save_minutes": f"{GONE}: --save_interval=N saves every N steps, SIGUSR1 at once",
    "warmup_iters": "warmup_steps",
}
ARITHMETIC = (ast.Constant, ast.UnaryOp, ast.BinOp, ast.unaryop, ast.operator)


class BadInput(Exception):
    """Bad input: one line on what was found, expected, and what to type."""

    exit_code = 2
    prefix = ""
    said = False  # whether another rank prints it


class RunFailed(Exception):
    """The run cannot continue: one line on what happened and what to do next."""

    exit_code = 1
    prefix = "failed: "
    said = False  # whether another rank prints it


def fail(message: object) -> NoReturn:
    raise BadInput(" ".join(str(message).splitlines()))


def run_script(main: Callable[[], int | None]) -> int:
    """Call main() and return the exit code. An error of ours is one line on stderr, any other is
    Python's traceback; a closed pipe, as by `| head`, or a full disk is none."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.reconfigure(errors="backslashreplace")  # for a terminal that lacks a character
    code = 0
    message = ""
    try:
        code = main() or 0
    except KeyboardInterrupt:
        code = 130
        message = "\n"
    except BrokenPipeError:
        pass
    except (BadInput, RunFailed) as error:
        code = error.exit_code
        if not error.said:
            message = f"{os.path.basename(sys.argv[0])}: {error.prefix}{error}\n"
    except Exception as error:
        code = 1
        below = error.__traceback__.tb_next  # without the frame of this function
        message = "".join(traceback.format_exception(type(error), error, below))
    try:
        print(end=printable(message), file=sys.stderr, flush=True)
        print(end="", flush=True)
    except (OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python complains at its exit
    return code


def printable(text: str) -> str:
    """Without control characters, with which a model or a file could type into the terminal, or
    write backwards; newlines and tabs stay."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", "", text)


@dataclass
class Knob:
    """What a script's source says of a knob. policy: the word of POLICY in which the comment ends,
    or ""."""

    default: Any
    comment: str = ""
    heading: str = ""  # the full-line comments above its group
    policy: str = ""

    def names_folder(self) -> bool:
        return self.policy != "free"


class Config(dict):
    """Every knob and its value. origins: name -> "flag", or the config file that set it. typed:
    names that flags set, and config files after the first one. base: values without what is typed,
    as written. knobs: name -> Knob."""


@contextmanager
def configured(*scopes: dict, argv: list | None = None, names: list | None = None) -> Iterator:
    """Set the knobs of `scopes`, globals() of scripts, from `argv`, yield a Config, give them back.

    Raises BadInput, and sets none, if any argument is invalid. Present values are the defaults, so
    that `train.max_steps = 5` takes effect. A later scope may restate a knob: both then hold one
    value. names: a list to which arguments other than flags and config files are added; None
    refuses them."""
    argv = sys.argv[1:] if argv is None else argv
    repository = os.path.dirname(os.path.abspath(scopes[0]["__file__"]))
    owned = [(scope, knobs_of(scope)) for scope in scopes]
    knobs = {name: knob for _, own in owned for name, knob in own.items()}
    config = Config({name: knob.default for name, knob in knobs.items()})
    config.knobs, config.base = knobs, dict(config)
    config.origins = {}
    first_file = None
    for argument in argv:
        if argument in ("-h", "--help"):
            continue
        if argument.startswith("-"):
            name, equals, value = argument.removeprefix("--").partition("=")
            if name in knobs and not equals:
                fail(f"{argument} has no value; write it as in --{name}={show(config[name])}")
            settings = {name: accept(name, value, argument, knobs)}
            origin = "flag"
        elif argument.endswith(".py"):
            settings = read_config_file(argument, repository, config, knobs)
            origin = argument
            first_file = first_file or argument
            own = settings if argument == first_file else settings.keys() & {"out_dir"}
            config.base |= {name: settings[name] for name in own}
        elif names is None:
            fail(f"unexpected argument {argument!r}; write config/FILE.py or --key=value")
        else:
            names.append(argument)
            continue
        config |= settings
        config.origins |= dict.fromkeys(settings, origin)
    config.typed = {
        name
        for name, origin in config.origins.items()
        if origin == "flag" or (origin != first_file and name != "out_dir")
    }
    if "-h" in argv or "--help" in argv:
        print_help(scopes[-1], config, knobs, takes_names=names is not None)
        raise SystemExit(0)
    for name, path in config.items():
        if name.endswith("_dir") and path:
            folder = os.getcwd() if config.origins.get(name) == "flag" else repository
            config[name] = os.path.normpath(os.path.join(folder, os.path.expanduser(path)))
    with ExitStack() as stack:
        for scope, own in owned:
            values = {name: config[name] for name in own}
            stack.enter_context(setting(scope, **values))
        yield config


@contextmanager
def setting(scope: dict[str, Any], /, **values: Any) -> Iterator[None]:
    """Set globals of a script in a block, or in a function that it decorates, then give them back.

    scope: globals() of the script. Raises KeyError, and sets none, if it lacks one of the names.
    """
    old = {name: scope[name] for name in values}
    scope.update(values)
    try:
        yield
    finally:
        scope.update(old)


def folder_name(config: Config) -> str:
    """The out_dir of a flag; else the config's and, in the order of the knobs, what was typed,
    changes a value and makes another run: out/mine,n_layer=2. Of a batch's two factors their
    product counts."""
    if config.origins.get("out_dir") == "flag":
        return config["out_dir"]
    names = {name for name in config.typed if config.knobs[name].names_folder()} - {"out_dir"}
    factors = {"batch_size", "accum_steps"} & config.keys()
    if product(config, factors) != product(config.base, factors):
        names |= factors & config.typed
    parent, name = os.path.split(config["out_dir"])
    for key in config:
        if key in names and config[key] != config.base[key]:
            value = re.sub(r"[^\w.+-]", lambda match: f"%{ord(match[0]):02X}", show(config[key]))
            name += f",{key}={value}"
    if len(name) > 120:
        name = f"{name[:107]},{sha256(name.encode()).hexdigest()[:12]}"
    return os.path.join(parent, name)


def product(values: dict, names: Collection[str]) -> int:
    return math.prod(values[name] for name in names)


def read_knobs(path: str | Path) -> dict[str, Knob]:
    """{name: Knob} of the knobs in the script at `path`, in order."""
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
            word = WORD.search(comment)
            knobs[name] = Knob(default, comment, heading, word[1] if word else "")
    return knobs


def knobs_of(scope: dict[str, Any]) -> dict[str, Knob]:
    """read_knobs() with present values as defaults. Raises BadInput for a plain global that is not
    in the source, such as train.max_step = 5: it would do nothing, in silence."""
    path = Path(scope["__file__"])
    knobs = read_knobs(path)
    defined = symtable(path.read_text(encoding="utf-8"), "", "exec").get_identifiers()
    for name in filter(NAME.fullmatch, scope.keys() - defined):
        if type(scope[name]) in (str, int, float, bool):
            accept(name, scope[name], f"{path.stem}.{name} = {scope[name]!r}", knobs)
    return {
        name: replace(knob, default=accept(name, scope[name], f"{name} = {scope[name]!r}", knobs))
        for name, knob in knobs.items()
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
    except (Exception, SystemExit) as error:  # whatever the file does
        place = error.__traceback__.tb_next  # None if the file cannot be compiled
        line = getattr(error, "lineno", None) or (place.tb_lineno if place else 1)
        fail(f"{argument}:{line}: {getattr(error, 'msg', error)}")
    return {
        name: accept(name, value, f"{argument}: {name} = {value!r}", knobs)
        for name, value in assigned.items()
        if not name.startswith("_")
    }


def accept(name: str, value: Any, written: str, knobs: dict) -> Any:
    """`value` as the knob's type; BadInput quotes `written`, the flag, or the file and
    assignment."""
    is_flag = written.startswith("-")
    if name not in knobs:
        fail(f"unknown name {name!r} in {written}; {hint_for(name, value, knobs, is_flag)}")
    default, comment = knobs[name].default, knobs[name].comment
    choices, interval = CHOICES.search(comment), INTERVAL.search(comment)
    words = []
    if choices:
        words = choices[0].split(" | ")
    elif isinstance(default, bool):
        words = ["true", "false"]
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
    there = NAMES_ELSEWHERE.get(name, "")
    if there in knobs:
        return f"here it is {to_type(there, value, is_flag)}"
    if " " in there:
        return there
    for near in difflib.get_close_matches(name.lower(), knobs, n=1):
        return f"did you mean {to_type(near, value, is_flag)}?"
    return "--help lists every name; one of your own, in a file, begins with _"


def print_help(scope: dict[str, Any], config: Config, knobs: dict, takes_names: bool) -> None:
    """Print the start of a script's docstring, its usage, and its knobs with the values that the
    other arguments give them. Wraps at the width of the terminal."""
    width = min(100, shutil.get_terminal_size((100, 24)).columns)
    usage = f"usage: python {os.path.basename(scope['__file__'])}"
    if takes_names:
        usage += " NAME ..."
    lines = [(scope.get("__doc__") or "").strip().split("\n\n")[0], ""]
    lines += [f"{usage} [config/FILE.py ...] [--key=value ...]"]
    lines += ["(a config file is Python, and is executed; later arguments win)"]
    if config.origins and "out_dir" in config:
        lines += ["", f"With these arguments the folder is {folder_name(config)}"]
    for heading, group in groupby(knobs.items(), lambda item: item[1].heading):
        lines += ["\n" + textwrap.fill(heading or "More", width)]
        for name, knob in group:
            comment = knob.comment
            if name in config.origins:
                comment = f"({config.origins[name]}; default {show(knob.default)}) {comment}"
            flag = f"  --{name}={show(config[name])}"
            line = f"{flag:<30}  {comment}".rstrip()
            lines += [textwrap.fill(line, width, subsequent_indent=" " * 32)]
    if any(knob.policy for knob in knobs.values()):
        lines += ["\nThe last word of a comment says what another value does:"]
        for word, meaning in {**POLICY, "none": NO_WORD}.items():
            lines += [textwrap.fill(f"  {word:<8}{meaning}", width, subsequent_indent=" " * 10)]
    print("\n".join(lines), flush=True)
