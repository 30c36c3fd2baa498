"""The command line: a script's knobs, from its globals, config files and flags; how a script fails.

A knob is a lower-case name that a script sets to a plain str, int, float or bool above its first
function or class; its default gives its type. A *_dir is a path, relative to the working directory.
The comment beside it, which goes on in lines that begin with `#` and two spaces, is its help. An
interval in it, such as [1, inf), and choices, a | b, are enforced. Its last word, after a semicolon,
says what another value does: `fixed` makes another run, which names another folder (`product
fixed`: if the product of the knobs with this word is another one), `free` changes how a run computes
or what it writes; no word: the course of the run. A script that calls train.main() adds knobs of its
own by train.knob(). A config file is executed as Python, sees the knobs as set so far, and may
assign knobs and _names."""

import ast
import builtins
import difflib
import keyword
import math
import os
import re
import shutil
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator
from configparser import RawConfigParser
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

HELP = ("-h", "--help")
REPO = Path(__file__).resolve().parent.parent
POLICY = ("fixed", "free", "product fixed")  # the words in which a comment may end
BOOLEANS = RawConfigParser.BOOLEAN_STATES  # of 1, yes, true, on; 0, no, false, off
KNOB = re.compile(  # comments above it, name, value, comment
    r"(?m)((?:^# .*\n)*)^([a-z][a-z0-9_]*) = (.*?)(?: +# (.*(?:\n#  .*)*))?$"
)
INTERVAL = re.compile(r"([\[(])(-?[\d.e]+|-inf), ?(-?[\d.e]+|inf)([\])])")
CHOICES = re.compile(r"\w+(?: \| \w+)+")
NAMES_ELSEWHERE = {  # a name of nanoGPT and others: what to type instead
    "always_save_checkpoint": "--save_interval=N saves whatever the loss is; best.pt is separate",
    "backend": "--device decides it: nccl for cuda, gloo for cpu",
    "bias": "no counterpart: none of the --n_layer layers has a bias",
    "decay_lr": "--schedule=cosine decays the rate, --schedule=constant does not",
    "eval_iters": "--eval_tokens=N evaluates the first N tokens, --eval_tokens=0 all of them",
    "eval_only": "no counterpart: every run also evaluates before its first step (--eval_interval)",
    "gradient_accumulation_steps": "here it is accum_steps",
    "learning_rate": "here it is peak_lr",
    "lr": "here it is peak_lr",
    "lr_decay_iters": "here it is decay_steps",
    "max_iters": "here it is max_steps",
    "top_p": "no counterpart: sample.py draws by --temperature and --top_k",
    "warmup_iters": "here it is warmup_steps",
}


class BadInput(Exception):
    """Bad input: one line on what was found, expected, and what to type."""

    exit_code = 2
    prefix = ""
    said = False  # whether another rank prints this error


class RunFailed(Exception):
    """The run cannot continue: one line on what happened and what to do next."""

    exit_code = 1
    prefix = "failed: "
    said = False


def fail(message: object) -> NoReturn:
    raise BadInput(" ".join(str(message).splitlines()))


def run_script(main: Callable[[], int | None]) -> int:
    """Call main() and return the exit code. What ends it is printed; a full disk is no error."""
    if sys.stdout:  # None where it was closed
        sys.stdout.reconfigure(errors="replace")  # what a terminal cannot show
    try:
        code = main() or 0
    except (Exception, KeyboardInterrupt) as error:  # a rank exits without Python: exit_process()
        code = print_error(error)
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python would complain at its exit
    return code


def print_error(error: BaseException) -> int:
    """Print an error of ours, or Ctrl-C, as one line on stderr, a closed pipe, as by `| head`, not
    at all, and any other as Python's traceback. Returns the exit code."""
    if isinstance(error, KeyboardInterrupt):
        print("stopped by Ctrl-C", file=sys.stderr)
        return 130
    if isinstance(error, BrokenPipeError):
        return 0
    if not isinstance(error, BadInput | RunFailed):
        traceback.print_exception(error)
        return 1
    if not error.said:
        print(f"{os.path.basename(sys.argv[0])}: {error.prefix}{error}", file=sys.stderr)
    return error.exit_code


def end_script(kind: type, error: BaseException, trace: object) -> NoReturn:
    raise SystemExit(print_error(error))


sys.excepthook = end_script  # also in the imports of a script, and in one that calls train.main()


def printable(text: str) -> str:
    """Without control characters, with which a model or a file could type into the terminal, or
    write backwards; newlines and tabs stay."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", "", text)


@dataclass
class Knob:
    """What a script's source says of a knob."""

    default: Any
    comment: str
    heading: str  # the comment on the lines above the knob, or above the first of its group

    @property
    def policy(self) -> str:
        """The word of POLICY in which the comment ends, or ""."""
        word = self.comment.rpartition("; ")[2]
        return word if word in POLICY else ""

    def names_folder(self) -> bool:
        return self.policy in ("fixed", "")


class Config(dict):
    """Every knob and its value. filed: names that config files set. typed: names that flags set, and
    config files after the first one. base: values without what is typed. knobs: name -> Knob.
    scopes: globals() of the scripts, and the knobs of each."""

    def __init__(self, scopes: list[tuple[dict, dict[str, Knob]]]):
        self.scopes = scopes
        self.knobs = {name: knob for _, knobs in scopes for name, knob in knobs.items()}
        super().__init__()
        for scope, knobs in scopes:
            self.update({name: scope.get(name, knobs[name].default) for name in knobs})
        self.base = dict(self)
        self.filed = set()
        self.typed = set()

    def settle(self, **values: Any) -> None:
        """Set knobs, here and in the globals of their scripts."""
        self.update(values)
        for scope, knobs in self.scopes:
            scope.update({name: self[name] for name in values if name in knobs})


@contextmanager
def configured(*scopes: dict, argv: list | None = None, names: list | None = None) -> Iterator:
    """Set the knobs of `scopes`, globals() of scripts, from `argv`, yield a Config, give them back.
    Flags win over config files, wherever they stand.

    Raises BadInput, and sets none, if any argument is invalid. Present values are the defaults, so
    that `train.max_steps = 5` takes effect. A later scope may restate a knob: both then hold one
    value. names: a list to which arguments other than flags and config files are added; None
    refuses them."""
    if threading.current_thread() is not threading.main_thread():
        fail("a run needs the main thread; for several at once start several processes")
    argv = sys.argv[1:] if argv is None else argv
    config = Config(
        [(scope, read_knobs(scope["__file__"]) | scope.get("ADDED_KNOBS", {})) for scope in scopes]
    )
    for argument, following in sorted(pairwise([*argv, ""]), key=order_of):
        if re.search("[\udc80-\udcff]", argument):  # bytes that Python could not decode
            fail(f"{ascii(argument)} is not UTF-8; expected a name that is")
        if argument in HELP:
            print_help(scopes[-1]["__doc__"] or "", config)
            raise SystemExit(0)
        if argument.startswith("-"):
            name, equals, value = argument.removeprefix("--").partition("=")
            if not equals and name in config.knobs:
                hint = "VALUE" if following[:2] in ("", "--") else following
                fail(f"{argument}: write {argument}={hint}")
            config[name] = accept(name, value, argument, config.knobs)
            config.typed.add(name)
        elif argument.endswith(".py"):
            settings = read_config_file(argument, config)
            config.update(settings)
            if config.filed:  # not by the first file
                config.typed |= settings.keys() - {"out_dir"}
            else:
                config.base.update(settings)
            config.filed |= settings.keys()
        elif names is not None:
            names.append(argument)
        else:
            fail(f"unexpected argument {argument!r}; write config/FILE.py or --key=value")
    for name, path in config.items():
        if name.endswith("_dir") and path:
            config[name] = os.path.normpath(os.path.expanduser(path))
    with ExitStack() as stack:
        for scope, knobs in config.scopes:
            stack.enter_context(setting(scope, **{name: config[name] for name in knobs}))
        yield config


def order_of(pair: tuple[str, str]) -> int:
    """Of an argument and the next one: config files come first, so that what they compute depends on
    no flag, and --help last, so that it shows the final values."""
    is_file = pair[0].endswith(".py") and not pair[0].startswith("-")
    return 2 * (pair[0] in HELP) - is_file


def read_config_file(argument: str, config: Config) -> dict:
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
def setting(scope: dict, /, **values: Any) -> Iterator[None]:
    """Set globals of a script in a block, or in a function that it decorates, then give them back.

    scope: globals() of the script. A name that it lacks is there only in the block.
    """
    old = {name: scope[name] for name in values if name in scope}
    scope.update(values)
    try:
        yield
    finally:
        scope.update(old)
        for name in values.keys() - old.keys():
            del scope[name]


def folder_name(config: Config, script: Path | None = None) -> str:
    """The out_dir of a flag; else the config's and, in the order of the knobs of train.py, what was
    typed, changes a value and makes another run: out/mine,n_layer=2. A script lab.py makes out/run to
    out/lab, and the out_dir of a config file to out/mine,lab."""
    name = config["out_dir"]
    if "out_dir" in config.typed:
        return name
    if script and "out_dir" in config.filed:
        name += f",{script.stem}"
    elif script and name == config.knobs["out_dir"].default:
        name = str(Path(name).with_name(script.stem))
    is_other_batch = product(config, config.knobs) != product(config.base, config.knobs)
    _, knobs = config.scopes[0]
    for key, knob in knobs.items():
        counts = is_other_batch if knob.policy == "product fixed" else knob.names_folder()
        if counts and key in config.typed and config[key] != config.base[key]:
            value = show(config[key])
            if key == "init_from":  # the folder of the run that it names
                value = Path(value).resolve().parent.name
            name += f",{key}={value}"
    return name


def product(values: dict, knobs: dict[str, Knob]) -> int:
    """The product of the `values` of those knobs whose comments say `product fixed`."""
    return math.prod(values[name] for name in knobs if knobs[name].policy == "product fixed")


def read_knobs(path: str | Path) -> dict[str, Knob]:
    """{name: Knob} of the knobs in the script at `path`, in order. A knob stands on one line."""
    source = Path(path).read_text(encoding="utf-8")
    top = re.split("(?m)^(?:def|class|@)", source)[0]
    knobs = {}
    heading = ""
    for above, name, value, comment in KNOB.findall(top):
        heading = re.sub("\n?# ", " ", above).strip() or heading
        with suppress(ValueError, SyntaxError):  # no plain value
            default = ast.literal_eval(value)
            if isinstance(default, str | int | float):
                knobs[name] = Knob(default, re.sub("\n#  *", " ", comment), heading)
    return knobs


def knobs_of_tools() -> dict[str, Knob]:
    """The knobs that bench.py and check.py have beside those of train.py."""
    return read_knobs(REPO / "bench.py") | read_knobs(REPO / "check.py")


def add_knob(scope: dict, name: str, default: Any, comment: str) -> None:
    """Add a knob to the ADDED_KNOBS in `scope`, the globals() of train.py. Raises BadInput."""
    call = f"train.knob({name!r}, {default!r}, ...)"
    added = scope["ADDED_KNOBS"]
    taken = {*keyword.kwlist, *vars(builtins), *knobs_of_tools(), *scope} - added.keys()
    is_name = name not in taken and re.fullmatch("[a-z][a-z0-9_]*", str(name))
    if not is_name or type(default) not in (str, int, float, bool):
        fail(
            f"{call}: expected a lower-case name that Python, train.py, bench.py and check.py do not "
            "use, and a default that is a str, int, float or bool"
        )
    knob = Knob(default, comment, "Added by the script")
    accept(name, default, call, {name: knob})
    added[name] = knob


def accept(name: str, value: Any, written: str, knobs: dict) -> Any:
    """`value` as the knob's type; BadInput quotes `written`, the flag, or the file and
    assignment."""
    if name not in knobs:
        hint = "--help lists every name; one of your own, in a file, begins with _"
        for near in difflib.get_close_matches(name, knobs, n=1):
            hint = f"did you mean {near}?"
        positive = re.sub("^no[-_]", "", name)
        if positive in knobs and re.search("True|[Ff]alse", repr(knobs[positive])):
            hint = f"write --{positive}=false"
        fail(f"unknown name {name!r} in {written}; {NAMES_ELSEWHERE.get(name, hint)}")
    default, comment = knobs[name].default, knobs[name].comment
    choices = CHOICES.search(comment)
    words = choices[0].split(" | ") if choices else ["true", "false"]
    fits = False
    if choices or isinstance(default, bool):
        if "true" in words:
            value = BOOLEANS.get(show(value).lower(), value)
        fits = show(value) in words
    elif isinstance(default, str):
        fits = isinstance(value, str) and (value or not default)
    else:
        with suppress(ValueError, OverflowError):  # int(nan), int(inf)
            number = float(show(value))
            value = type(default)(number)
            left, low, high, right = INTERVAL.search(f"{comment} [-inf, inf]").groups()
            is_low_end = left == "[" and number == float(low)
            is_high_end = right == "]" and number == float(high)
            is_inside = float(low) < number < float(high) or is_low_end or is_high_end
            fits = value == number and is_inside
    if not fits:
        expected = f"{type(default).__name__}, {name} = {default!r}  # {comment}"
        fail(f"{written}: expected {choices[0] if choices else expected}")
    return value


def show(value: Any) -> str:
    """A knob's value as it is typed."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def print_help(about: str, config: Config) -> None:
    """Print a script's docstring and its knobs under the headings of the source, as wide as the
    terminal, with their final values."""
    width = line_width(100)
    about = re.sub(r"\n  (?=\S)", "\n", about.strip())
    for line in re.sub(r"(?m)^(\S.*)\n(?=[^\s-])", r"\1 ", about).splitlines():  # a paragraph
        print(textwrap.fill(line, width, subsequent_indent=2 * re.match(" *", line)[0]))
    for heading in dict.fromkeys(knob.heading for knob in config.knobs.values()):
        print("\n" + textwrap.fill(heading, width))
        for name, knob in config.knobs.items():
            if knob.heading == heading:
                line = f"{f'  --{name}={show(config[name])}':<30}  {knob.comment}"
                print(textwrap.fill(line, width, subsequent_indent=" " * 32))


def line_width(without: int = 10**6) -> int:
    """Columns of the terminal that stdout is; of a pipe or a file, `without`."""
    is_terminal = sys.stdout and sys.stdout.isatty()
    return shutil.get_terminal_size().columns if is_terminal else without
