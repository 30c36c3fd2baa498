"""
The knobs of a script, read from its source, so that --help is always up to date.

A knob is a lower-case name that the script sets to a plain str, int, float or bool above its first
function or class. The type of the default is the type of the knob, in config files and flags:
    int      12, 1_000, or a float that is a whole number (1e3 is 1000)
    float    any number, including nan and inf unless an interval excludes them
    bool     true/false/yes/no/1/0 in any case; the AUTO_OR_BOOL knobs also take auto
    *_dir    a path; empty only where the default is
The comment beside a knob is its help. It continues in the lines directly below that begin with `#`
and two spaces. Full-line comments above a group of knobs are the heading of the group.
A comment may give the allowed values, and others are then refused: an interval such as [1, inf) or
(0, 1] (a square bracket includes its end), or for a str all the choices, such as cosine | linear.
"""

import ast
import os
import re
import sys
import textwrap
from pathlib import Path

AUTO_OR_BOOL = ("compile", "deterministic")
BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
INTERVAL = re.compile(r"([\[(])(-?[\d.]+), (-?[\d.]+|inf)([\])])")
CHOICES = re.compile(r"\w+(?: \| \w+)+")


def read_knobs(path):
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
            ) if re.fullmatch("[a-z][a-z0-9_]*", name) and (default := constant(value)) is not None:
                heading = " ".join(above) or heading
            case _:
                heading = ""
                continue
        comment = [lines[end - 1][statement.end_col_offset :]]
        while end < len(lines) and lines[end].startswith("#  "):
            comment.append(lines[end])
            end += 1
        words = " ".join(line.strip("# ") for line in comment)
        knobs[name] = default, words, heading
    return knobs


def constant(expression):
    """The str, number or bool that `expression`, such as 5 * 8, is without any name; else None."""
    numbers_alone = (ast.Constant, ast.UnaryOp, ast.BinOp, ast.unaryop, ast.operator)
    if not expression or not all(isinstance(n, numbers_alone) for n in ast.walk(expression)):
        return None
    value = eval(compile(ast.Expression(expression), "", "eval"))
    return value if isinstance(value, str | int | float) else None


def convert(name, value, default, comment, is_text):
    """`value` as `default`'s type. is_text: of a flag. Raises ValueError with what is expected."""
    if isinstance(default, bool) or name in AUTO_OR_BOOL:
        word = str(value).lower()
        if word == "auto" and name in AUTO_OR_BOOL:
            return word
        if word in BOOLEANS:
            return BOOLEANS[word]
        raise ValueError(("auto, " if name in AUTO_OR_BOOL else "") + "true or false")
    if isinstance(default, str):
        if not isinstance(value, str):
            raise ValueError("a string in quotes")
        if name.endswith("_dir") and default and not value:
            raise ValueError("a folder")
        choices = CHOICES.search(comment)
        if choices and value not in choices[0].split(" | "):
            raise ValueError("one of " + choices[0].replace(" | ", ", "))
        return value
    is_int = isinstance(default, int)
    try:
        if isinstance(value, str) != is_text or isinstance(value, bool):
            raise ValueError
        number = float(value)
        if is_int and not number.is_integer():
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ValueError("an int" if is_int else "a number") from None
    if interval := INTERVAL.search(comment):
        opening, low, high, closing = interval.groups()
        above = number >= float(low) if opening == "[" else number > float(low)
        below = number <= float(high) if closing == "]" else number < float(high)
        if not (above and below):  # NaN is neither
            raise ValueError(f"{'an int' if is_int else 'a number'} in {interval[0]}")
    return int(number) if is_int else number


def show(value):
    return str(value).lower() if isinstance(value, bool) else str(value)


def print_help(script, docstring, knobs, takes_names):
    """Print the help of a script: the start of its docstring, its usage and its knobs."""
    flags = ("NAME ... " if takes_names else "") + "[config/FILE.py ...] [--key=value ...]"
    lines = [docstring.strip().split("\n\n")[0], f"\nusage: python {script} {flags}"]
    written = {name: f"  --{name}={show(default)}  " for name, (default, _, _) in knobs.items()}
    width = min(40, max(map(len, written.values())))
    last_heading = None
    for name, (_, comment, heading) in knobs.items():
        if heading != last_heading:
            lines.append("\n" + textwrap.fill(heading or "More", 100))
            last_heading = heading
        looks = {"initial_indent": f"{written[name]:{width}}", "subsequent_indent": " " * width}
        lines.append(textwrap.fill(comment, 100, **looks) or written[name].rstrip())
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:  # `--help | head`: else Python flushes again at exit, and complains
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
