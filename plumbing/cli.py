"""The command line: a script's knobs, from its globals, config files and flags; how a script fails.

A knob is a lower-case name that a script sets to a plain str, int, float or bool above its first
function or class; its default gives its type. A *_dir is a path, relative to the working directory.
The comment beside it, which goes on in lines that begin with `#` and two spaces, is its help. An
interval in it, such as [1, inf), and choices, a | b, are enforced. Its last word, after a semicolon,
says what another value does: `fixed` makes another run, which names another folder, `free` changes
how a run computes or what it writes; no word: the course of the run. A config file is executed as
Python, sees the knobs as set so far, and may assign knobs and _names."""

import ast
import builtins
import difflib
import math
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

POLICY = ("fixed", "free")  # the words in which a comment may end
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
        message = "stopped by Ctrl-C\n"
    except BrokenPipeError:
        pass
    except (BadInput, RunFailed) as error:
        code = error.exit_code
        if not error.said:
            message = f"{os.path.basename(sys.argv[0])}: {error.prefix}{error}\n"
    except Exception:
        code = 1
        message = traceback.format_exc()
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
    """Every knob and its value. typed: names that flags set, and config files after the first one.
    base: values without what is typed. knobs: name -> Knob."""

    def __init__(self, knobs: dict[str, Knob]):
        super().__init__({name: knob.default for name, knob in knobs.items()})
        self.knobs = knobs
        self.base = dict(self)
        self.typed = set()


@contextmanager
def configured(*scopes: dict, argv: list | None = None, names: list | None = None) -> Iterator:
    """Set the knobs of `scopes`, globals() of scripts, from `argv`, yield a Config, give them back.

    Raises BadInput, and sets none, if any argument is invalid. Present values are the defaults, so
    that `train.max_steps = 5` takes effect. A later scope may restate a knob: both then hold one
    value. names: a list to which arguments other than flags and config files are added; None
    refuses them."""
    argv = sys.argv[1:] if argv is None else argv
    owned = [(scope, read_knobs(scope["__file__"])) for scope in scopes]
    config = Config(
        {
            name: replace(knob, default=scope[name])
            for scope, knobs in owned
            for name, knob in knobs.items()
        }
    )
    n_files = 0
    for argument in argv:
        if argument in ("-h", "--help"):
            continue
        if argument.startswith("-"):
            name, _, value = argument.removeprefix("--").partition("=")
            settings = {name: accept(name, value, argument, config.knobs)}
            config.typed |= settings.keys()
        elif argument.endswith(".py"):
            settings = read_config_file(argument, config)
            n_files += 1
            typed = settings.keys() - {"out_dir"} if n_files > 1 else set()
            config.typed = (config.typed | typed) - (settings.keys() - typed)
            config.base |= {name: settings[name] for name in settings.keys() - typed}
        elif names is None:
            fail(f"unexpected argument {argument!r}; write config/FILE.py or --key=value")
        else:
            names.append(argument)
            continue
        config |= settings
    if "-h" in argv or "--help" in argv:
        print_help(scopes[-1], config, takes_names=names is not None)
        raise SystemExit(0)
    for name, path in config.items():
        if name.endswith("_dir") and path:
            config[name] = os.path.normpath(os.path.expanduser(path))
    with ExitStack() as stack:
        for scope, knobs in owned:
            stack.enter_context(setting(scope, **{name: config[name] for name in knobs}))
        yield config


def read_config_file(argument: str, config: Config) -> dict[str, Any]:
    """{name: value} that a config file assigns. An error in it is Python's."""
    if not os.path.isfile(argument):
        fail(f"no config file {argument} in {os.getcwd()}")
    assigned = {"__builtins__": vars(builtins) | config}  # knobs are visible as builtins
    exec(compile(Path(argument).read_bytes(), argument, "exec"), assigned)
    return {
        name: accept(name, value, f"{argument}: {name} = {value!r}", config.knobs)
        for name, value in assigned.items()
        if not name.startswith("_")
    }


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
    if "out_dir" in config.typed:
        return config["out_dir"]
    names = {name for name in config.typed if config.knobs[name].names_folder()}
    factors = {"batch_size", "accum_steps"} & config.keys()
    if product(config, factors) != product(config.base, factors):
        names |= factors & config.typed
    parent, name = os.path.split(config["out_dir"])
    for key in config:
        if key in names and config[key] != config.base[key]:
            name += f",{key}={show(config[key])}"
    return os.path.join(parent, name)


def product(values: dict, names: Collection[str]) -> int:
    return math.prod(values[name] for name in names)


def read_knobs(path: str | Path) -> dict[str, Knob]:
    """{name: Knob} of the knobs in the script at `path`, in order."""
    source = Path(path).read_text(encoding="utf-8")
    lines = source.splitlines()
    knobs = {}
    heading = ""
    end = 0  # the number of the last line that belongs to a knob or a statement
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            break
        above = [line.strip("#-= ") for line in lines[end : node.lineno - 1] if line[:1] == "#"]
        end = node.end_lineno
        default = None
        match node:
            case ast.Assign([ast.Name(name)], value) | ast.AnnAssign(ast.Name(name), _, value):
                with suppress(ValueError):  # no plain value
                    default = ast.literal_eval(value)
        if isinstance(default, str | int | float) and NAME.fullmatch(name):
            heading = " ".join(above) or heading
            comment = lines[end - 1][node.end_col_offset :].strip("# ")
            while end < len(lines) and lines[end].startswith("#  "):
                comment += " " + lines[end].strip("# ")
                end += 1
            word = WORD.search(comment)
            knobs[name] = Knob(default, comment, heading, word[1] if word else "")
    return knobs


def accept(name: str, value: Any, written: str, knobs: dict) -> Any:
    """`value` as the knob's type; BadInput quotes `written`, the flag, or the file and
    assignment."""
    is_flag = written.startswith("-")
    if name not in knobs:
        fail(f"unknown name {name!r} in {written}; {hint_for(name, knobs)}")
    default, comment = knobs[name].default, knobs[name].comment
    expected = f"expected {type(default).__name__}, {name} = {default!r}  # {comment}"
    words = []
    if choices := CHOICES.search(comment):
        words = choices[0].split(" | ")
    elif isinstance(default, bool):
        words = ["true", "false"]
    if words:
        text = show(value).lower()
        if "true" in words:
            value = BOOLEANS.get(text, text)
        fits = show(value) in words
    elif isinstance(default, str):
        fits = isinstance(value, str) and (value or not name.endswith("_dir") or not default)
    else:
        fits = False
        with suppress(ValueError, OverflowError):  # int(nan), int(inf)
            number = float(show(value)) if isinstance(value, str) == is_flag else math.nan
            value = type(default)(number)
            fits = value == number and is_in(number, INTERVAL.search(comment))
    if not fits:
        fail(f"{written}: {expected}")
    return value


def is_in(number: float, interval: re.Match | None) -> bool:
    """Whether a number is in an interval such as [1, inf). None: any number but NaN is."""
    opening, low, high, closing = interval.groups() if interval else ("[", "-inf", "inf", "]")
    is_above = number > float(low) or (number == float(low) and opening == "[")
    is_below = number < float(high) or (number == float(high) and closing == "]")
    return is_above and is_below


def show(value: Any) -> str:
    """A knob's value as it is typed."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def hint_for(name: str, knobs: dict) -> str:
    """What to write instead of an unknown `name`."""
    there = NAMES_ELSEWHERE.get(name, "")
    if there in knobs:
        return f"here it is {there}"
    if " " in there:
        return there
    for near in difflib.get_close_matches(name.lower(), knobs, n=1):
        return f"did you mean {near}?"
    return "--help lists every name; one of your own, in a file, begins with _"


def print_help(scope: dict[str, Any], config: Config, takes_names: bool) -> None:
    """Print the start of a script's docstring, its usage, and its knobs with the values that the
    other arguments give them."""
    words = "NAME ... " if takes_names else ""
    print((scope.get("__doc__") or "").strip())
    words = "NAME ... " if takes_names else ""
    usage = f"usage: python {os.path.basename(scope['__file__'])} {words}[config/FILE.py ...]"
    print(f"\n{usage} [--key=value ...]")
    for heading, group in groupby(config.knobs.items(), lambda item: item[1].heading):
        print("\n" + textwrap.fill(heading or "More", 100))
        for name, knob in group:
            line = f"{f'  --{name}={show(config[name])}':<30}  {knob.comment}"
            print(textwrap.fill(line, 100, subsequent_indent=" " * 32))
