"""How many bugs does check.py find? Each mutant is judged before check.py sees it.

    python tests/mutants.py --data_dir=DIR --count=220 --out=F --seed=1   # goes on where F ends
    python tests/mutants.py --data_dir=DIR --bugs=tests/bugs.toml --out=F # bugs of real repositories
    python tests/mutants.py --data_dir=DIR --sound=tests/sound.txt --out=F    # loops without a bug
    python tests/mutants.py --table=F

A mutant is one small edit, by an operator, in a function that computes. What it is, before and
without check.py:

- raises: it does not train for twelve steps. No bug that anybody would miss, and left out.
- broken: a test of the loop fails, one of JUDGES.
- neutral: else. Left out, too: many edits change nothing, or only how well a good loop learns.
"""

import ast
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from pathlib import Path

from conftest import REPO, apply_patch, pydoc_text, run_python
from run_page import NOT_COPIED

PLACES = {  # file -> functions that are mutated
    "model.py": (
        "rotary_tables rotate causal_attention forward ngram_row cross_entropy generate "
        "flops_per_token reset_parameters visible"
    ),
    "optim.py": "step orthogonal keep_or_replace sorted_by_role stacked_parts configure_optimizers",
    "plumbing/data.py": "read_rows __getitem__ __len__",
    "plumbing/snapshot.py": "evaluating swap step_optimizer restore average_or_restore_buffers",
    "train.py": (
        "lr_at half_cosine sequences_at __len__ starts __getitem__ batches_to_come train_step set_lr "
        "count_targets forward_backward clip update evaluate sum_losses record_evaluation "
        "count_evaluation names_to_save count_batch finish_rows build_run"
    ),
}
WEIGHTS = {"model.py": 6, "train.py": 6, "optim.py": 3}  # of their edits, against one of others
TENSORS = ("forward", "causal_attention", "rotate")
CONFIG = (
    "--dataset=small --device=cpu --dtype=float32 --compile=false --report=false --n_embd=32 "
    "--n_head=2 --block_size=32 --batch_size=8 --ngram_rows=256 --conv_width=3 "
    "--optimizer=muon --peak_lr=1e-2 --warmup_steps=10 --max_steps=80"
).split()
PLAIN = "--n_embd=64 --n_head=4 --ngram_rows=0 --conv_width=1".split()
TEXTS = {name: pydoc_text()[:60_000] for name in ("small", "bytes")}
TEXTS["numbers"] = " ".join(map(str, range(700)))
JUDGES = [f"tests/test_{name}.py" for name in "model optim batches loop resume".split()]


# ---- the edits -----------------------------------------------------------------------------------

OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
OPERATORS |= {ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult}
COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
COMPARISONS |= {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
AXES = ("transpose", "chunk", "softmax", "flatten", "cat", "size", "unbind", "roll", "triu")
TWINS = {"min": "max", "max": "min", "any": "all", "all": "any", "cos": "sin", "sin": "cos"}
TWINS |= {"zeros_": "ones_", "train": "eval", "eval": "train", "triu": "tril", "ceil": "floor"}


def edits(function):
    """(kind, node, source to put in its place) for each edit in a function."""
    names = [argument.arg for argument in function.args.args if argument.arg != "self"]
    called = {id(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}
    for statement in function.body:
        for node in ast.walk(statement):
            yield from edits_of(node, function.name)
            if isinstance(node, ast.Name) and node.id in names and id(node) not in called:
                if isinstance(node.ctx, ast.Load) and len(names) > 1:
                    other = names[names.index(node.id) - 1]
                    yield "another variable", node, other


def edits_of(node, function):
    source = ast.unparse
    if isinstance(node, ast.BinOp):
        left, right = f"({source(node.left)})", f"({source(node.right)})"
        yield "a term dropped", node, left
        if type(node.op) in OPERATORS:
            new = ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
            yield "another operation", node, f"({source(new)})"
        if isinstance(node.op, ast.Sub | ast.Div | ast.MatMult | ast.Mod):
            yield "swapped", node, f"({source(ast.BinOp(node.right, node.op, node.left))})"
        elif isinstance(node.op, ast.Add | ast.Mult):
            yield "a term dropped", node, right
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        new = ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators)
        yield "off by one", node, f"({source(new)})"
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        for value in {node.value + 1, node.value - 1}:
            yield "off by one", node, f"({value})"
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield "wrong flag", node, str(not node.value)
    elif isinstance(node, ast.Constant) and type(node.value) is float:
        yield "another constant", node, f"({4 * node.value + 1e-9})"
    elif isinstance(node, ast.If | ast.IfExp):
        yield "wrong flag", node.test, f"(not ({source(node.test)}))"
        yield "wrong flag", node.test, "False"
    elif isinstance(node, ast.Call):
        yield from edits_of_call(node)
    elif isinstance(node, ast.Expr | ast.AugAssign) and not isinstance(node.value, ast.Constant):
        yield "a line dropped", node, "pass"
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call | ast.BinOp):
        target = node.targets[0]
        used = {each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)}
        if isinstance(target, ast.Name) and target.id in used:
            yield "a line dropped", node, "pass"
        if isinstance(target, ast.Name) and function in TENSORS:
            yield "detached", node.value, f"({source(node.value)}).detach()"


def edits_of_call(node):
    source = ast.unparse
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    if isinstance(node.func, ast.Attribute) and not node.keywords:
        yield "a call dropped", node, f"({source(node.func.value)})"
    if len(node.args) >= 2:
        args = [node.args[1], node.args[0], *node.args[2:]]
        yield "swapped", node, source(ast.Call(node.func, args, node.keywords))
    if name in TWINS:
        yield "swapped", node.func, source(node.func).removesuffix(name) + TWINS[name]
    for keyword in node.keywords:
        others = [each for each in node.keywords if each is not keyword]
        if keyword.arg not in (None, "device", "dtype"):
            yield "an argument dropped", node, source(ast.Call(node.func, node.args, others))
    for argument in [*node.args, *(k.value for k in node.keywords)] if name in AXES else ():
        text = source(argument)
        for other in {"-1", "0", "1", "2"} - {text} if text.lstrip("-").isdigit() else ():
            yield "wrong axis", argument, other


def drawn(count, seed):
    """So many of all mutants, evenly over kinds, and over files by WEIGHTS: [(file, kind, line,
    function, old, new, mutated source)]."""
    groups = {}
    for file, names in PLACES.items():
        content = (REPO / file).read_bytes()
        starts = [0]
        for line in content.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        seen = {content}
        for function in ast.walk(ast.parse(content)):
            if not isinstance(function, ast.FunctionDef) or function.name not in names.split():
                continue
            for kind, node, new in edits(function):
                begin = starts[node.lineno - 1] + node.col_offset
                end = starts[node.end_lineno - 1] + node.end_col_offset
                mutated = content[:begin] + new.encode() + content[end:]
                if mutated not in seen:
                    seen.add(mutated)
                    old = content[begin:end].decode()
                    each = (file, kind, node.lineno, function.name, old, new, mutated)
                    groups.setdefault((file, kind), []).append(each)
    rng = random.Random(seed)
    order = []
    for group in groups.values():
        rng.shuffle(group)
    while len(order) < count and any(groups.values()):
        for (file, _), group in groups.items():
            for _ in range(WEIGHTS.get(file, 1)):
                order += [group.pop()] if group else []
    rng.shuffle(order)
    return order[:count]


# ---- run them ------------------------------------------------------------------------------------


def run_in(folder, *words, seconds=300):
    """`python WORDS` in a copy of the repository."""
    try:
        return run_python(*words, cwd=folder, timeout=seconds)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 1, "", "killed")


def last_line(done):
    return (done.stderr.splitlines() or ["killed"])[-1]


def judge(folder, flags):
    """(raises | broken | neutral, why), by the rule above."""
    trained = run_in(folder, "train.py", *flags, "--max_steps=12", f"--out_dir={folder}/trained")
    if trained.returncode:
        return "raises", last_line(trained)
    tested = run_in(folder, *"-m pytest -x -n0".split(), *JUDGES, seconds=3600)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", tested.stdout, re.MULTILINE)
    if tested.returncode:
        return "broken", failed[1] if failed else last_line(tested)
    return "neutral", ""


def run_check(folder, flags):
    """The faults that check.py finds in a copy."""
    done = run_in(folder, "check.py", *flags, f"--out_dir={folder}/out")
    found = Path(folder, "out", "check.json")
    if not found.exists():
        return {"code": 1, "faults": [last_line(done)]}
    checks = json.loads(found.read_text())["sanity"]["checks"]
    faults, warnings = (
        [name for name, each in checks.items() if each["mark"] == mark] for mark in "✗!"
    )
    return {"code": done.returncode, "faults": faults, "warnings": warnings}


def cases(options):
    """(what it is, flags of check.py beside CONFIG, file to change, its new content) of each loop;
    or a patch in place of the last two."""
    if "sound" in options:
        for words in Path(options["sound"]).read_text().splitlines():
            name, *flags = words.split()
            patch = next((REPO / "tests").glob(f"[hs]*/{name}.patch"), None)
            if not patch:  # a script, or only a flag
                paths = REPO / "tests" / "sound" / f"{name}.py", REPO / name
                flags.append(next((str(path) for path in paths if path.is_file()), name))
            yield {"what": words, "is": "sound"}, [*PLAIN, *flags], patch, None
    elif "bugs" in options:
        for bug in tomllib.loads(Path(options["bugs"]).read_text())["bug"]:
            source = (REPO / bug["file"]).read_text()
            assert source.count(bug["old"]) == 1, bug["name"]
            new = source.replace(bug["old"], bug["new"]).encode()
            flags = [*PLAIN, *bug.get("flags", "").split()]  # without which it does nothing
            yield {"what": bug["name"], "is": "bug"}, flags, bug["file"], new
    else:
        fields = ("file", "kind", "line", "function", "old", "new")
        for *what, new in drawn(int(options.get("count", 220)), int(options.get("seed", 1))):
            yield dict(zip(fields, what, strict=True)), [], what[0], new


def main():
    options = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:])
    if "table" in options:
        return print_tables(options["table"])
    data_dir = Path(options["data_dir"]).resolve()
    data_dir.mkdir(exist_ok=True)
    for name, text in TEXTS.items():
        if not (data_dir / name).exists():
            path = data_dir / f"{name}.txt"
            path.write_text(text)
            tokenizer = f"--tokenizer={'byte' if name == 'bytes' else 'char'}"
            words = name, f"--input={path}", tokenizer, f"--data_dir={data_dir}"
            run_python("prepare_data.py", *words)
    out = Path(options["out"])
    done = out.read_text().splitlines() if out.exists() else []
    for row, flags, path, new in list(cases(options))[len(done) :]:
        flags = [*CONFIG, f"--data_dir={data_dir}", *flags]
        with tempfile.TemporaryDirectory() as scratch:
            folder = shutil.copytree(REPO, Path(scratch, "copy"), ignore=NOT_COPIED)
            if new is not None:
                (folder / path).write_bytes(new)
            elif path:
                apply_patch(path.read_text(), folder)
            if "is" not in row:
                row["is"], row["why"] = judge(folder, flags)
            if row["is"] not in ("raises", "neutral"):
                row["check"] = run_check(folder, flags)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)
    return print_tables(out)


def print_tables(path):
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    print(f"{len(rows)}: {dict(Counter(row['is'] for row in rows))}")
    tried = [row for row in rows if "check" in row]
    for key in ("kind", "file", "is"):
        print(f"\n| {key} | bugs | NO-GO |\n|---|--:|--:|")
        for name in sorted({row.get(key, "") for row in tried}):
            codes = [row["check"]["code"] for row in tried if row.get(key, "") == name]
            print(f"| {name} | {len(codes)} | {sum(codes)} |")
    print("\n| check | finds | alone |\n|---|--:|--:|")
    faults = [row["check"]["faults"] for row in tried]
    for name, count in Counter(name for each in faults for name in each).most_common():
        print(f"| {name} | {count} | {sum(each == [name] for each in faults)} |")
    print(f"\nNO-GO: {sum(row['check']['code'] for row in tried)} of {len(tried)}. GO:")
    for row in tried:
        if not row["check"]["code"]:
            row.pop("check")
            print(f"  {json.dumps(row)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
