"""
The command line: a script's knobs, config files and flags onto its globals, and how it fails.

    python train.py config/FILE.py --batch_size=32 --out_dir=out/mine     # later ones win

A knob is a lower-case name that a script sets to a plain str, int, float or bool above its first
function or class. Its default gives its type: int (12, 1_000, 1e3), float, bool (true, yes, 1, false,
no, 0; AUTO_OR_BOOL knobs also take auto), str, or *_dir, a path: of a flag, relative to the working
directory, else to the repository. The comment beside a knob is its help; it goes on in lines below
that begin with `#` and two spaces. An interval in it, such as [1, inf) or (0, 1], and choices, such as
cosine | linear, are enforced. Full-line comments above a group of knobs are its heading.
A config file is executed as Python, and may compute with the knobs as set so far. Every name that it
assigns must be a knob, unless it begins with _.
"""

import ast
import builtins
import difflib
import math
import os
import re
import sys
import sysconfig
import textwrap
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from glob import glob
from hashlib import sha256
from pathlib import Path
from symtable import symtable
from typing import Any, NoReturn

AUTO_OR_BOOL = ("compile", "deterministic")
BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
NAME = re.compile("[a-z][a-z0-9_]*")  # of a knob
INTERVAL = re.compile(r"([\[(])(-?[\d.e]+), (-?[\d.e]+|inf)([\])])")
CHOICES = re.compile(r"\w+(?: \| \w+)+")
NANOGPT = {  # nanoGPT's name: the name here, or what to type instead
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
PLUMBING = os.path.dirname(os.path.abspath(__file__)) + os.sep
NOT_OWN = (PLUMBING, sysconfig.get_path("stdlib") + os.sep, "<frozen", "<eval_with_key")
LIBRARIES = re.compile(r"[/\\](site|dist)-packages[/\\]|torchinductor")  # or made by the compiler


# ---- errors --------------------------------------------------------------------------------------


class BadInput(Exception):
    """Bad input: one line on what was found, expected, and what to type. Exit code 2."""


class RunFailed(Exception):
    """The run cannot continue: one line on what happened and what to do next. Exit code 1."""


def fail(message: object) -> NoReturn:
    raise BadInput(" ".join(str(message).splitlines()))


def run_script(main: Callable[[], int | None]) -> int:
    """Call main() and return the exit code of the script. An error of ours is one line on stderr; any
    other is a traceback that ends in the innermost line of the user's own code."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.reconfigure(errors="backslashreplace")  # for a terminal that lacks a character
    code, words = 0, ""
    try:
        code = main() or 0
    except KeyboardInterrupt:
        code, words = 130, "\n"
    except BrokenPipeError:  # `| head` has read enough
        pass
    except (BadInput, RunFailed) as error:
        code = 2 if isinstance(error, BadInput) else 1
        if not getattr(error, "said", False):  # by another rank
            words = f"{os.path.basename(sys.argv[0])}: {'failed: ' * (code == 1)}{error}\n"
    except Exception as error:
        code, words = 1, "\n".join(folded_traceback(error)) + "\n"
    try:
        print(end=printable(words), file=sys.stderr, flush=True)
        print(end="", flush=True)
    except (OSError, ValueError):  # a closed pipe or a full disk: Python would complain at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return code


def printable(text: str) -> str:
    """`text` without control characters except newlines, tabs and colours: what comes from a model
    or a file of someone else must not move the cursor or type into the terminal."""
    return re.sub(r"(\033\[\d*m)|[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: match[1] or "", text)


def folded_traceback(error: BaseException) -> list[str]:
    """Lines of a traceback from the user's outermost line to the innermost one, without the frames of
    plumbing/ and libraries. Of torch's compiler, only the error that it met in the user's code."""
    frames = list(traceback.extract_tb(error.__traceback__))
    words = "".join(traceback.format_exception_only(error)).rstrip()
    if of_compiler(error):  # it has that place, and quotes that error in a long explanation
        frames += getattr(error, "real_stack", None) or []
        quoted = re.search(r"got (\w+)\((['\"])(.*?)\2\)", words)
        words = f"{quoted[1]}: {quoted[3]}" if quoted else words.partition("\n\n")[0]
    own = [number for number, frame in enumerate(frames) if is_own(frame.filename)] or [-1]
    below = frames[own[-1] + 1 :]
    place = f"{os.path.basename(below[-1].filename)}:{below[-1].lineno}" if below else ""
    left_out = f"; {len(below)} below are left out, the last is {place}" if below else ""
    lines = [f"Traceback (most recent call last{left_out}):"]
    for before, number in zip([own[0] - 1, *own], own, strict=False):
        if hidden := frames[before + 1 : number]:
            ours = any(each.filename.startswith(PLUMBING) for each in hidden)
            where = "plumbing/" if ours else "libraries"
            lines.append(f"  ... {len(hidden)} frame{'s' * (len(hidden) > 1)} in {where} ...")
        lines += "".join(traceback.format_list(frames[number : number + 1])).splitlines()
    lines.append(words)
    earlier = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if earlier is None or of_compiler(earlier):  # its failure is why the eager step was tried
        return lines
    return [*folded_traceback(earlier), "", "which led to:", "", *lines]


def of_compiler(error: BaseException) -> bool:
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def is_own(path: str) -> bool:
    return not path.startswith(NOT_OWN) and not LIBRARIES.search(path)


# ---- onto globals --------------------------------------------------------------------------------


class Config(dict):
    """Every knob and its value. flags: names that flags set. base: values without flags, as written."""

    flags: set[str]
    base: dict[str, Any]


@contextmanager
def configured(
    *scopes: dict[str, Any], argv: list[str] | None = None, names: list[str] | None = None
) -> Iterator[Config]:
    """
    Set the knobs of `scopes` from `argv` (default: the command line); if any of it is invalid, set
    none and raise BadInput. Yields a Config. Restores the knobs on exit.

    scopes: globals() of a script or vars() of a module. Present values are the defaults, so that
        `train.max_steps = 5` takes effect. A later scope may declare a knob of an earlier one again,
        to change its default; both then hold the same value.
    names: a list to which arguments other than flags and config files are added; None refuses them.
    """
    argv = sys.argv[1:] if argv is None else argv
    repository = os.path.dirname(os.path.abspath(scopes[0]["__file__"]))
    owned = [(scope, knobs_of(scope)) for scope in scopes]
    knobs = {name: knob for _, own in owned for name, knob in own.items()}
    if "-h" in argv or "--help" in argv:
        print_help(scopes[-1], knobs, takes_names=names is not None)
        raise SystemExit(0)

    config = Config({name: default for name, (default, _, _) in knobs.items()})
    config.base = dict(config)
    config.flags = set()
    for i, argument in enumerate(argv):
        if argument.startswith("-"):
            name, value = read_flag(argument, argv[i + 1 :], knobs)
            config[name] = value
            config.flags.add(name)
        elif argument.endswith(".py"):
            settings = read_config_file(argument, repository, config, knobs)
            config |= settings
            config.base |= settings
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


def folder_name(config: Config, named: Collection[str]) -> str:
    """The out_dir that was typed; else the config's, with the flags that make it another run, in the
    order of the knobs: out/shakespeare,n_layer=2. These are flags in `named` that change the value
    the config has anyway, and both batch_size and accum_steps if their product changes."""
    if "out_dir" in config.flags:
        return config["out_dir"]
    factors = {"batch_size", "accum_steps"} & config.keys()
    typed = {key for key in config.flags & {*named} if config[key] != config.base[key]} - factors
    products = [math.prod(values[key] for key in factors) for values in (config, config.base)]
    if products[0] != products[1]:
        typed |= factors
    parent, name = os.path.split(config["out_dir"])
    for key in filter(typed.__contains__, config):
        value = re.sub(r"[^\w.+-]", lambda match: f"%{ord(match[0]):02X}", show(config[key]))
        name += f",{key}={value}"
    if len(name) > 120:
        name = f"{name[:107]},{sha256(name.encode()).hexdigest()[:12]}"
    return os.path.join(parent, name)


# ---- knobs, from the source, so that --help cannot go stale --------------------------------------


def read_knobs(path: str | Path) -> dict[str, tuple[Any, str, str]]:
    """{name: (default, comment, heading)} of the knobs in the script at `path`, in order."""
    source = Path(path).read_text(encoding="utf-8")
    lines = source.splitlines()
    knobs = {}
    heading = ""
    end = 0  # the number of the last line that belongs to a knob or a statement
    for statement in ast.parse(source).body:
        above = [
            line.strip("#-= ") for line in lines[end : statement.lineno - 1] if line[:1] == "#"
        ]
        end = statement.end_lineno
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                break
            case (
                ast.Assign(targets=[ast.Name(name)], value=value)
                | ast.AnnAssign(target=ast.Name(name), value=value)
            ) if NAME.fullmatch(name) and (default := constant(value)) is not None:
                heading = " ".join(above) or heading
            case _:
                heading = ""
                continue
        comment = [lines[end - 1][statement.end_col_offset :]]
        while end < len(lines) and lines[end].startswith("#  "):
            comment.append(lines[end])
            end += 1
        knobs[name] = default, " ".join(line.strip("# ") for line in comment), heading
    return knobs


def constant(expression: ast.expr | None) -> str | int | float | None:
    """The str, number or bool that `expression`, such as 5 * 8, is without any name; else None."""
    numbers_alone = (ast.Constant, ast.UnaryOp, ast.BinOp, ast.unaryop, ast.operator)
    if not expression or not all(isinstance(n, numbers_alone) for n in ast.walk(expression)):
        return None
    value = eval(compile(ast.Expression(expression), "", "eval"))
    return value if isinstance(value, str | int | float) else None


def knobs_of(scope: dict[str, Any]) -> dict[str, tuple[Any, str, str]]:
    """read_knobs() with present values as defaults. Raises BadInput for a plain global that somebody
    set but the source does not, such as train.max_step = 5: it would do nothing, in silence."""
    path = Path(scope["__file__"])
    knobs = read_knobs(path)
    source = path.read_text(encoding="utf-8")
    defined = scope if "import *" in source else symtable(source, "", "exec").get_identifiers()
    for name in filter(NAME.fullmatch, scope.keys() - defined):
        if type(scope[name]) in (str, int, float, bool):
            hint = hint_for(name, scope[name], knobs, is_flag=False)
            fail(f"{path.stem}.{name} = {scope[name]!r}: {path.name} has no such name; {hint}")
    return {
        name: (accept(name, scope[name], f"{name} = {scope[name]!r}", knobs), *words)
        for name, (_, *words) in knobs.items()
    }


def read_flag(argument: str, following: list[str], knobs: dict) -> tuple[str, Any]:
    """(name, value) of a flag --name=value."""
    name, equals, text = argument.removeprefix("--").partition("=")
    if name in knobs and not equals:
        default = knobs[name][0]
        example = "true" if isinstance(default, bool) or name in AUTO_OR_BOOL else default
        if following and not following[0].startswith("-") and not following[0].endswith(".py"):
            example = following[0]
        fail(f"{argument} has no value; write --{name}={show(example)}")
    return name, accept(name, text, argument, knobs, is_flag=True)


def read_config_file(argument: str, repository: str, config: dict, knobs: dict) -> dict[str, Any]:
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
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == argument]
        line = getattr(error, "lineno", None) or (lines or [1])[0]
        fail(f"{argument}:{line}: {getattr(error, 'msg', error)}")
    return {
        name: accept(name, value, f"{argument}: {name} = {value!r}", knobs)
        for name, value in assigned.items()
        if not name.startswith("_")
    }


def accept(name: str, value: Any, written: str, knobs: dict, is_flag: bool = False) -> Any:
    """`value` as the knob's type. If that is impossible, raises BadInput and quotes `written`."""
    if name not in knobs:
        fail(f"unknown name {name!r} in {written}; {hint_for(name, value, knobs, is_flag)}")
    default, comment, _ = knobs[name]
    if isinstance(default, bool) or name in AUTO_OR_BOOL:
        allowed = BOOLEANS | ({"auto": "auto"} if name in AUTO_OR_BOOL else {})
        expected = "auto, true or false" if name in AUTO_OR_BOOL else "true or false"
        result = allowed.get(str(value).lower())
    elif isinstance(default, str):
        choices = CHOICES.search(comment)
        is_folder = name.endswith("_dir") and default
        expected = "a folder" if is_folder else "a string in quotes"
        if choices:
            expected = "one of " + choices[0].replace(" | ", ", ")
        fits = isinstance(value, str) and (value or not is_folder)
        result = value if fits and (not choices or value in choices[0].split(" | ")) else None
    else:
        expected = "an int" if isinstance(default, int) else "a number"
        right_type = isinstance(value, str) == is_flag and not isinstance(value, bool)
        result = to_number(value, type(default)) if right_type else None
        interval = INTERVAL.search(comment)
        if interval and not (result is not None and is_within(result, *interval.groups())):
            expected += f" in {interval[0]}"
            result = None
        if isinstance(result, int) and abs(result) >= 2**63:  # no tensor or file holds such an int
            expected += " below 2**63"
            result = None
    if result is None:
        fail(f"{written}: expected {expected} such as {to_type(name, default, is_flag)}")
    return result


def to_number(value: Any, kind: type) -> int | float | None:
    try:
        number = float(value)
        return number if kind is float else int(number) if number.is_integer() else None
    except (TypeError, ValueError, OverflowError):
        return None


def is_within(number: float, opening: str, low: str, high: str, closing: str) -> bool:
    above = number >= float(low) if opening == "[" else number > float(low)
    below = number <= float(high) if closing == "]" else number < float(high)
    return above and below  # NaN is neither


# ---- words ---------------------------------------------------------------------------------------


def show(value: Any) -> str:
    """A knob's value as it is typed."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def to_type(name: str, value: Any, is_flag: bool) -> str:
    """How to write a knob and its value, on the command line or in a file."""
    return f"--{name}={show(value)}" if is_flag else f"{name} = {value!r}"


def hint_for(name: str, value: Any, knobs: dict, is_flag: bool) -> str:
    """What to write instead of an unknown `name`."""
    there = NANOGPT.get(name, "")
    if there in knobs:
        return f"here it is {to_type(there, value, is_flag)}"
    if " " in there and knobs.keys() >= set(re.findall(r"--(\w+)", there)):
        return there
    near = difflib.get_close_matches(name.lower(), knobs, n=1)
    if near:
        return f"did you mean {to_type(near[0], value, is_flag)}?"
    return "--help lists every name"


def print_help(scope: dict[str, Any], knobs: dict, takes_names: bool) -> None:
    """Print the start of a script's docstring, its usage and its knobs."""
    usage = f"usage: python {os.path.basename(scope['__file__'])}" + " NAME ..." * takes_names
    lines = [(scope.get("__doc__") or "").strip().split("\n\n")[0], ""]
    lines += [f"{usage} [config/FILE.py ...] [--key=value ...]"]
    lines += ["(a config file is Python, and is executed; later arguments win)"]
    written = {name: f"  --{name}={show(default)}  " for name, (default, _, _) in knobs.items()}
    width = min(40, max(map(len, written.values())))
    last_heading = None
    for name, (_, comment, heading) in knobs.items():
        if heading != last_heading:
            lines.append("\n" + textwrap.fill(heading or "More", 100))
            last_heading = heading
        looks = {"initial_indent": f"{written[name]:{width}}", "subsequent_indent": " " * width}
        lines.append(textwrap.fill(comment, 100, **looks) or written[name].rstrip())
    print("\n".join(lines), flush=True)
