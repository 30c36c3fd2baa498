"""
The knobs of a script, as its source declares them; a change there is a change of --help as well.

A knob is a lower-case name that the script sets to a plain str, int, float or bool above its first
function. The type of that default is the type of the knob, in a file as in a flag:
    int      12, 1_000, or a float that is a whole number (1e3 is 1000)
    float    any number, nan and inf included: an interval refuses those
    bool     true/false/yes/no/1/0 in any case; the AUTO_OR_BOOL knobs also take auto
    *_dir    a path; empty only where the default is
The comment beside a knob is its help. It goes on in the lines directly below that are indented or
begin with `#` and two spaces. A full-line comment above a run of knobs is the heading of the run.
A comment may say which values are allowed, and then no other is taken: an interval such as [1, inf)
or (0, 1] (a square bracket includes its end), or for a str all the choices, such as cosine | linear.
"""

import ast
import io
import math
import os
import re
import sys
import textwrap
import tokenize

AUTO_OR_BOOL = ("compile", "deterministic")
BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
INTERVAL = re.compile(r"([\[(])(-?[\d.]+), (-?[\d.]+|inf)([\])])")
CHOICES = re.compile(r"\w+(?: \| \w+)+")


def read_knobs(path):
    """{name: (default, comment, heading)} of the knobs in the script at `path`, in their order."""
    with tokenize.open(path) as file:
        source = file.read()
    lines = source.splitlines()
    comments = {  # by line number
        token.start[0]: token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and not token.string.startswith("# fmt:")
    }
    knobs = {}
    heading = ""
    used = 0  # the last line that belongs to a knob or a statement
    for statement in ast.parse(source).body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            break
        above = [comments[n] for n in range(used + 1, statement.lineno) if n in comments]
        used = statement.end_lineno
        try:
            (target,) = statement.targets
            name = target.id
            default = ast.literal_eval(statement.value)
            if name != name.lower() or name[0] == "_":
                raise ValueError
            if type(default) not in (str, int, float, bool):
                raise ValueError
        except (AttributeError, ValueError):
            heading = ""
            continue
        heading = " ".join(c.strip("#-= ") for c in above) or heading
        comment = [comments.get(used, "")]
        while used < len(lines) and used + 1 in comments and lines[used].startswith((" ", "#  ")):
            used += 1
            comment.append(comments[used])
        knobs[name] = default, " ".join(c.strip("# ") for c in comment).strip(), heading
    return knobs


def convert(name, value, default, is_text):
    """`value` (is_text: of a flag) as `default`'s type. The ValueError says what is expected."""
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
        return value
    try:
        if is_text:
            value = int(value) if value.lstrip("+-").replace("_", "").isdecimal() else float(value)
        if isinstance(default, float) and type(value) in (int, float):
            return float(value)
        if type(value) in (int, float) and value == int(value):  # 1e3; never 1.5, nan or inf
            return int(value)
    except (ValueError, OverflowError):
        pass
    raise ValueError("an int" if isinstance(default, int) else "a number")


def expected(value, default, comment):
    """None where the knob's comment allows `value`, else what it asks for. A NaN is in no interval."""
    if isinstance(value, str):
        choices = CHOICES.search(comment)
        choices = choices[0].split(" | ") if choices else [value]
        return None if value in choices else "one of " + ", ".join(choices)
    interval = None if isinstance(value, bool) else INTERVAL.search(comment)
    if not interval:
        return None
    low = float(interval[2])
    high = float(interval[3])
    above = value > low or (interval[1] == "[" and value == low)
    below = value < high or (interval[4] == "]" and value == high)
    if above and below:
        return None
    words = f"{interval[2]} or more" if interval[1] == "[" else f"more than {interval[2]}"
    ends = f", up to {interval[3]}" if interval[4] == "]" else f", below {interval[3]}"
    if high == math.inf:
        ends = ", and finite" if isinstance(default, float) else ""
    return words + ends


def show(value):
    return str(value).lower() if isinstance(value, bool) else str(value)


def print_help(script, knobs, takes_names):
    """Everything comes from the script's source, so it cannot go stale."""
    print((script.get("__doc__") or "").strip().split("\n\n")[0])
    flags = ("NAME ... " if takes_names else "") + "[config/FILE.py ...] [--key=value ...]"
    print(f"\nusage: python {os.path.basename(sys.argv[0])} {flags}")
    width = min(36, max(len(f"--{name}={show(knobs[name][0])}") for name in knobs)) + 4
    last_heading = None
    for name, (default, comment, heading) in knobs.items():
        if heading != last_heading:
            print("\n" + textwrap.fill(heading or "More", 100))
            last_heading = heading
        flag = f"  --{name}={show(default)}"
        if len(flag) + 2 > width:
            print(flag)
            flag = ""
        wrapped = textwrap.wrap(comment, 100 - width) or [""]
        print(f"{flag:{width}}{wrapped[0]}".rstrip())
        for line in wrapped[1:]:
            print(" " * width + line)
