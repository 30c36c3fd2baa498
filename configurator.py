"""
Overrides a script's knobs from config files and flags; later ones win:

    python train.py config/FILE.py --batch_size=32 --out_dir=out/mine

A knob is a lower-case name that the script sets to a plain str, int, float or bool above its first
function. The type of that default is the type of the knob, in a file as in a flag:
    int      12, 1_000, or a float that is a whole number (1e3 is 1000)
    float    any number, nan and inf included: refusing those is the script's own range check
    bool     true/false/yes/no/1/0 in any case; the AUTO_OR_BOOL knobs also take auto
    *_dir    a path: in a flag against the working directory, in a file or by default against the
             repository (the script's folder); absolute once configure() has returned; "" stays ""
A comment may say which values are allowed, and then no other is taken: an interval such as [1, inf)
or (0, 1] (a square bracket includes its end), or for a str all the choices, such as cosine | linear.
A config file holds only `name = value` lines: literals, arithmetic, names assigned above.

The comment beside a knob is its help. It goes on in the lines directly below that are indented or
begin with `#` and two spaces. A full-line comment above a run of knobs is the heading of the run.
"""

import ast
import difflib
import io
import math
import operator
import os
import re
import sys
import textwrap
import tokenize

AUTO_OR_BOOL = ("compile", "deterministic")
BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
}


def fail(message):
    """Bad input: one line on stderr, exit code 2."""
    line = " ".join(str(message).splitlines())
    print(f"{os.path.basename(sys.argv[0])}: {line}", file=sys.stderr)
    raise SystemExit(2)


def configure(*scopes, argv=None, names=None):
    """
    Sets the knobs of `scopes` from `argv` (default: the command line), once all of it has proved
    right; otherwise fail()s with nothing set. Returns ({every knob: its value}, {names given}).

    scopes: globals() of a script or vars() of a module. A later scope may restate a knob of an
        earlier one, to give it another default; both then hold the same value.
    names: a list that takes the arguments that are neither flags nor config files; None: an error.
    """
    argv = sys.argv[1:] if argv is None else argv
    repository = os.path.dirname(os.path.abspath(scopes[0]["__file__"]))
    owned = [read_knobs(scope["__file__"]) for scope in scopes]
    knobs = {name: knob for each in owned for name, knob in each.items()}
    if "-h" in argv or "--help" in argv:
        print_help(scopes[-1], knobs, takes_names=names is not None)
        raise SystemExit(0)

    settings, positionals = {}, []
    for i, argument in enumerate(argv):
        if argument.startswith("-"):
            name, value = read_flag(argument, argv[i + 1 :], knobs)
            settings[name] = against(os.getcwd(), value) if name.endswith("_dir") else value
        elif argument.endswith(".py"):
            for name, value in read_config_file(argument, repository, knobs):
                settings[name] = against(repository, value) if name.endswith("_dir") else value
        elif names is None:
            fail(f"unexpected argument {argument!r}; write config/FILE.py or --key=value")
        else:
            positionals.append(argument)

    config = {}
    for name, (default, comment, _) in knobs.items():
        if name.endswith("_dir"):
            default = against(repository, default)
        config[name] = settings.get(name, default)
        if wanted := expected(config[name], default, comment):
            fail(f"--{name}={config[name]}: expected {wanted}")
    for scope, each in zip(scopes, owned, strict=True):
        scope.update({name: config[name] for name in each})
    if names is not None:
        names.extend(positionals)
    return config, set(settings)


def against(folder, path):
    return os.path.normpath(os.path.join(folder, os.path.expanduser(path))) if path else ""


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
    knobs, heading, used = {}, "", 0  # used: the last line that belongs to a knob or a statement
    for statement in ast.parse(source).body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            break
        above = [comments[n] for n in range(used + 1, statement.lineno) if n in comments]
        used = statement.end_lineno
        try:
            (target,) = statement.targets
            name, default = target.id, ast.literal_eval(statement.value)
        except (AttributeError, ValueError):
            heading = ""
            continue
        if name != name.lower() or name[0] == "_" or type(default) not in (str, int, float, bool):
            heading = ""
            continue
        heading = " ".join(c.strip("#-= ") for c in above) or heading
        comment = [comments.get(used, "")]
        while used < len(lines) and used + 1 in comments and lines[used].startswith((" ", "#  ")):
            used += 1
            comment.append(comments[used])
        knobs[name] = default, " ".join(c.strip("# ") for c in comment).strip(), heading
    return knobs


def read_flag(argument, following, knobs):
    """(name, value) of one --name=value."""
    name, equals, text = argument.lstrip("-").partition("=")
    if name not in knobs:
        near = nearest(name, knobs)
        hint = f"did you mean --{near}{equals}{text}?" if near else "--help lists every name"
        fail(f"unknown name {name!r} in {argument}; {hint}")
    default = knobs[name][0]
    if not equals:
        example = "true" if isinstance(default, bool) or name in AUTO_OR_BOOL else show(default)
        if following and not following[0].startswith("-") and not following[0].endswith(".py"):
            example = following[0]
        fail(f"{argument} has no value; write --{name}={example}")
    if not argument.startswith("--"):
        fail(f"{argument}: flags begin with two dashes; write --{name}={text}")
    try:
        return name, convert(name, text, default, is_text=True)
    except ValueError as error:
        fail(f"{argument}: expected {error} such as --{name}={show(default)}")


def read_config_file(argument, repository, knobs):
    """[(name, value)] of a config file, looked up here first and then in the repository."""
    path = next(filter(os.path.isfile, (argument, os.path.join(repository, argument))), None)
    if path is None:
        folder = os.path.join(repository, "config")
        files = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        known = ", ".join(f"config/{file}" for file in files if file.endswith(".py"))
        looked = " or ".join(dict.fromkeys((os.getcwd(), repository)))
        fail(f"no config file {argument} in {looked}; there are: {known or 'none'}")
    try:
        with open(path, "rb") as file:
            statements = ast.parse(file.read()).body
    except (SyntaxError, ValueError, OSError) as error:
        fail(f"{argument}:{getattr(error, 'lineno', None) or 1}: {getattr(error, 'msg', error)}")

    settings, assigned = [], {}
    for statement in statements:
        where = f"{argument}:{statement.lineno}"
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # a docstring
        try:
            (target,) = statement.targets
            name, value = target.id, evaluate(statement.value, assigned)
        except (AttributeError, ValueError, TypeError, ArithmeticError) as error:
            found = error if isinstance(error, ArithmeticError) else ast.unparse(statement)
            fail(
                f"{where}: {str(found).splitlines()[0]}: a config file holds only name = value"
                " lines, of literals, arithmetic and names assigned above"
            )
        if name not in knobs:
            near = nearest(name, knobs)
            hint = f"did you mean {near} = {value!r}?" if near else "--help lists every name"
            fail(f"unknown name {name!r} in {where}; {hint}")
        default = knobs[name][0]
        try:
            assigned[name] = convert(name, value, default, is_text=False)
        except ValueError as error:
            fail(f"{where}: {name} = {value!r}: expected {error} such as {name} = {default!r}")
        settings.append((name, assigned[name]))
    return settings


def evaluate(node, assigned):
    """The value of an expression in a config file. Nothing is executed, nothing can be called."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float)):
        return node.value
    if isinstance(node, ast.Name) and node.id in assigned:
        return assigned[node.id]
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](evaluate(node.operand, assigned))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = evaluate(node.left, assigned), evaluate(node.right, assigned)
        if isinstance(node.op, ast.Pow) and abs(right) > 64:
            raise ValueError  # it would take for ever
        return OPERATORS[type(node.op)](left, right)
    raise ValueError(f"not a plain value: {ast.unparse(node)}")


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
        if isinstance(value, str):
            return value
        raise ValueError("a string in quotes")
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


INTERVAL = re.compile(r"([\[(])(-?[\d.]+), (-?[\d.]+|inf)([\])])")
CHOICES = re.compile(r"\w+(?: \| \w+)+")


def expected(value, default, comment):
    """None where the knob's comment allows `value`, else what it asks for. A NaN is in no interval."""
    if isinstance(value, str):
        choices = CHOICES.search(comment)
        choices = choices[0].split(" | ") if choices else [value]
        return None if value in choices else "one of " + ", ".join(choices)
    interval = None if isinstance(value, bool) else INTERVAL.search(comment)
    if not interval:
        return None
    low, high = float(interval[2]), float(interval[3])
    above = value > low or (interval[1] == "[" and value == low)
    below = value < high or (interval[4] == "]" and value == high)
    if above and below:
        return None
    words = f"{interval[2]} or more" if interval[1] == "[" else f"more than {interval[2]}"
    ends = f", up to {interval[3]}" if interval[4] == "]" else f", below {interval[3]}"
    if high == math.inf:
        ends = ", and finite" if isinstance(default, float) else ""
    return words + ends


def nearest(name, knobs):
    return next(iter(difflib.get_close_matches(name.lower(), knobs, n=1)), None)


def show(value):
    return str(value).lower() if isinstance(value, bool) else str(value)


def print_help(script, knobs, takes_names):
    """Everything comes from the script's source, so it cannot go stale."""
    print((script.get("__doc__") or "").strip().split("\n\n")[0])
    flags = ("NAME ... " if takes_names else "") + "[config/FILE.py ...] [--key=value ...]"
    print(f"\nusage: python {os.path.basename(script['__file__'])} {flags}")
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
