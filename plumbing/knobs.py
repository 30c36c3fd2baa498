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
import re
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


def convert(name, value, default, comment, is_text):
    """
    `value` (is_text: of a flag) as `default`'s type. The ValueError says what is expected, where it
    has another type or the comment does not allow it.
    """
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
        if is_text:
            value = int(value) if value.lstrip("+-").replace("_", "").isdecimal() else float(value)
        number = int(value) if is_int else float(value)
        fits = type(value) in (int, float) and (number == value or not is_int)  # 1e3; not 1.5
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        raise ValueError("an int" if is_int else "a number")
    if interval := INTERVAL.search(comment):
        opening, low, high, closing = interval.groups()
        above = number >= float(low) if opening == "[" else number > float(low)
        below = number <= float(high) if closing == "]" else number < float(high)
        if not (above and below):  # a NaN is neither
            words = f"{low} or more" if opening == "[" else f"more than {low}"
            if high != "inf":
                words += f", up to {high}" if closing == "]" else f", below {high}"
            elif not is_int:
                words += ", and finite"
            raise ValueError(words)
    return number


def show(value):
    return str(value).lower() if isinstance(value, bool) else str(value)


def print_help(script, docstring, knobs, takes_names):
    """Everything comes from the script's source, so it cannot go stale."""
    print((docstring or "").strip().split("\n\n")[0])
    flags = ("NAME ... " if takes_names else "") + "[config/FILE.py ...] [--key=value ...]"
    print(f"\nusage: python {script} {flags}")
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
