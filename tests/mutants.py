"""How many bugs does check.py find? Mutants of the code, each judged before check.py sees it.

    python tests/mutants.py --data_dir=DIR --count=220 --out=mutants.jsonl     # under an hour
    python tests/mutants.py --table=mutants.jsonl
    python tests/mutants.py --data_dir=DIR --sound=sound.jsonl                 # 52 loops without a bug

A mutant is one small edit, by an operator, in a function that computes: of the model, the
optimizer, the data, the step, the evaluation, what is saved. The rule that says what it is:

- silent: it imports and trains. One that raises is no bug that anybody would miss, and is left out.
- broken: one of the contracts below does not hold. Each compares the mutant with itself (the logits
  before a changed token; the loss with -log p of its own logits; a resume with the whole run), or, where
  the model is untouched, with the numbers of the sound code on the same weights and batches.
- worse: else, if its loss after 80 steps is above all of ten seeds of the sound loop.
- neutral: else. Left out, too: many edits change nothing, or only how well a good loop learns.
"""

import ast
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
PLACES = {  # file -> functions and classes that are mutated
    "model.py": None,  # all
    "optim.py": None,
    "plumbing/data.py": ("OrderedWindows", "read_rows"),
    "plumbing/safe_step.py": ("evaluating", "swap", "step_unless", "Snapshot"),
    "train.py": (
        "lr_at half_cosine rows_at ShuffledWindows open_dataset batches_to_come checkpoint autocast "
        "train_step count_targets set_lr forward_backward clip update evaluate sum_losses "
        "record_evaluation count_evaluation names_to_save count_batch build_run"
    ).split(),
}
SKIPPED = ("describe", "__repr__", "print_sample", "InvalidShape")  # words, not numbers
CONFIG = {
    "dataset": "small",
    "device": "cpu",
    "dtype": "float32",
    "compile": "false",
    "n_layer": 1,
    "n_embd": 32,
    "n_head": 2,
    "block_size": 32,
    "batch_size": 8,
    "ngram_rows": 256,
    "conv_width": 3,
    "n_future_tokens": 2,
    "optimizer": "muon",
    "peak_lr": 1e-2,
    "min_lr": 1e-4,
    "warmup_steps": 10,
    "max_steps": 80,
    "report": "false",
}
TIMEOUT = 90  # seconds
SOUND = """\
--n_embd=64 --n_head=4 --max_steps=200 --peak_lr=1e-3 --min_lr=1e-4
--n_embd=64 --n_head=4 --peak_lr=1e-4 --min_lr=1e-5
--n_embd=32 --n_head=2 --peak_lr=3e-4
--n_embd=16 --n_head=2
--n_embd=128 --n_head=2
--n_embd=192 --n_head=3
--n_embd=96 --n_head=6 --n_layer=3
--n_layer=4
--n_layer=2 --grad_checkpoint=true
--n_layer=2 --dropout=0.2
--dropout=0.5
--label_smoothing=0.1
--block_size=16 --batch_size=32
--block_size=128 --batch_size=4
--block_size=100 --batch_size=5
--batch_size=1
--batch_size=64
--batch_size=3 --accum_steps=5
--accum_steps=4
--optimizer=adamw --peak_lr=1e-3
--optimizer=adamw --peak_lr=1e-2
--optimizer=adam --peak_lr=3e-3
--optimizer=sgd --peak_lr=0.1
--optimizer=sgd --peak_lr=0.5 --grad_clip=0
--optimizer=momentum --peak_lr=0.02
--optimizer=muon --peak_lr=6e-2
--schedule=linear
--schedule=constant
--schedule=step
--schedule=onecycle
--schedule=wsd --cooldown_steps=10
--warmup_steps=0
--grad_clip=0
--grad_clip=0.1
--weight_decay=0
--weight_decay=1.2
--beta1=0.8 --beta2=0.99 --optimizer=adamw
--ema_decay=0.9
--ema_decay=0.999 --eval_tokens=500
--ngram_rows=512
--conv_width=4
--n_future_tokens=3
--ngram_rows=4096 --conv_width=4 --n_future_tokens=3 --n_layer=2
--dtype=bfloat16
--dtype=bfloat16 --n_layer=2 --optimizer=adamw
--seed=7
--plateau_factor=0.5
--deterministic=false
--dataset=bytes
--dataset=numbers
z_loss
experts
gru
learned_positions
norms
growing_batch
ema_and_raw
metric
schedule
lion
window
weight_norm
freeze
"""  # flags beside a plain model, or one of tests/hacks


# ---- the edits -----------------------------------------------------------------------------------

OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
OPERATORS |= {ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult}
COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
COMPARISONS |= {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
AXES = ("dim", "transpose", "split", "chunk", "softmax", "flatten", "cat", "size", "unbind", "roll")
TWINS = {"min": "max", "max": "min", "any": "all", "all": "any", "cos": "sin", "sin": "cos"}
TWINS |= {"zeros_": "ones_", "train": "eval", "eval": "train", "triu": "tril", "ceil": "floor"}


def edits(tree):
    """(kind, node, source to put in its place) for each edit in a function."""
    for node in ast.walk(tree):
        new = None
        if isinstance(node, ast.BinOp):
            if type(node.op) in OPERATORS:
                new = ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
                yield "another operation", node, f"({ast.unparse(new)})"
            yield "a term dropped", node, f"({ast.unparse(node.left)})"
            if isinstance(node.op, ast.Sub | ast.Div | ast.MatMult | ast.Mod):
                new = ast.BinOp(node.right, node.op, node.left)
                yield "swapped", node, f"({ast.unparse(new)})"
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
            new = ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators)
            yield "off by one", node, f"({ast.unparse(new)})"
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            for value in {node.value + 1, node.value - 1}:
                yield "off by one", node, f"({value})"
        elif isinstance(node, ast.Constant) and type(node.value) is bool:
            yield "wrong flag", node, str(not node.value)
        elif isinstance(node, ast.Constant) and type(node.value) is float:
            yield "another constant", node, f"({4 * node.value + 1e-9})"
        elif isinstance(node, ast.If | ast.IfExp):
            yield "wrong flag", node.test, f"(not ({ast.unparse(node.test)}))"
            yield "wrong flag", node.test, "False"
        elif isinstance(node, ast.Call):
            yield from call_edits(node)
        elif isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
            yield "a line dropped", node, "pass"
        elif isinstance(node, ast.AugAssign):
            yield "a line dropped", node, "pass"
        elif isinstance(node, ast.Assign) and not isinstance(node.value, ast.Constant):
            target = ast.unparse(node.targets[0])
            if target.isidentifier() and target in {
                n.id for n in ast.walk(node.value) if hasattr(n, "id")
            }:
                yield "a line dropped", node, "pass"
            yield "detached", node.value, f"({ast.unparse(node.value)}).detach()"
        elif isinstance(node, ast.Return) and node.value:
            yield "detached", node.value, f"({ast.unparse(node.value)}).detach()"
        elif isinstance(node, ast.Dict) and len(node.keys) > 2 and None not in node.keys:
            for n in range(len(node.keys)):
                less = ast.Dict(
                    node.keys[:n] + node.keys[n + 1 :], node.values[:n] + node.values[n + 1 :]
                )
                yield "an entry dropped", node, ast.unparse(less)


def call_edits(node):
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    source = ast.unparse
    if len(node.args) >= 1:
        yield "constant for a function", node, f"({source(node.args[0])})"
    elif isinstance(node.func, ast.Attribute):
        yield "constant for a function", node, f"({source(node.func.value)})"
    if len(node.args) >= 2:
        args = [node.args[1], node.args[0], *node.args[2:]]
        yield "swapped", node, source(ast.Call(node.func, args, node.keywords))
    if name in TWINS:
        called = source(node.func)
        twin = called[: len(called) - len(name)] + TWINS[name]
        yield "swapped", node.func, twin
    for keyword in node.keywords:
        others = [each for each in node.keywords if each is not keyword]
        if keyword.arg not in (None, "device", "dtype"):
            yield "an argument dropped", node, source(ast.Call(node.func, node.args, others))
    if name in AXES:
        for argument in [*node.args, *(k.value for k in node.keywords if k.arg == "dim")]:
            text = source(argument)
            for other in (
                {"-1", "0", "1", "2"} - {text} if text in ("-1", "-2", "0", "1", "2") else ()
            ):
                yield "wrong axis", argument, other


def mutants(path, names):
    """(kind, line, function, mutated source) of each edit in a file."""
    source = (REPO / path).read_text(encoding="utf-8")
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))
    content = source.encode()
    for outer in ast.walk(ast.parse(source)):
        if not isinstance(outer, ast.FunctionDef) or outer.name in SKIPPED:
            continue
        if names is not None and not is_within(source, outer, names):
            continue
        for statement in outer.body:
            for kind, node, new in edits(statement):
                begin = starts[node.lineno - 1] + node.col_offset
                end = starts[node.end_lineno - 1] + node.end_col_offset
                mutated = content[:begin] + new.encode() + content[end:]
                yield kind, node.lineno, outer.name, content[begin:end].decode(), new, mutated


def is_within(source, function, names):
    for node in ast.parse(source).body:
        if getattr(node, "name", None) in names or function.name in names:
            if node.lineno <= function.lineno <= node.end_lineno:
                return True
    return False


def drawn(count, seed):
    """So many of all mutants, drawn evenly over files and kinds."""
    groups = {}
    seen = set()
    for path, names in PLACES.items():
        for kind, line, function, old, new, source in mutants(path, names):
            if source not in seen and source != (REPO / path).read_bytes():
                seen.add(source)
                each = {"file": path, "kind": kind, "line": line, "function": function}
                groups.setdefault((path, kind), []).append(
                    (each | {"old": old, "new": new}, source)
                )
    rng = random.Random(seed)
    for group in groups.values():
        rng.shuffle(group)
    total = sum(map(len, groups.values()))
    print(f"{total} mutants in {len(groups)} groups", flush=True)
    weights = {"model.py": 5, "train.py": 5, "optim.py": 3, "plumbing/data.py": 2}
    order = []
    while len(order) < count and any(groups.values()):
        for (path, _), group in groups.items():
            for _ in range(weights.get(path, 1) if len(order) > 60 else 1):
                if group:
                    order.append(group.pop())
    rng.shuffle(order)
    return order[:count]


# ---- what a mutant is: in a process of its own, in a copy ----------------------------------------


def observe(data_dir, seeds=(1337,)):
    """{name: numbers} of a repository in the working directory: "own ..." are True where a contract
    with itself holds; the others are compared with those of the sound code. loss: after the short
    run."""
    import numpy as np
    import torch
    import torch.nn.functional as F
    from torch.utils.flop_counter import FlopCounterMode

    import train
    from plumbing import cli

    flags = CONFIG | {"data_dir": data_dir}
    found = {}

    def flat(values):
        return [float(v) for each in values for v in torch.as_tensor(each).double().flatten()]

    def noisy(vocab=64, **knobs):
        shape = {n: getattr(train, n) for n in cli.read_knobs(train.__file__)}
        torch.manual_seed(3)
        shape |= {"n_future_tokens": 1, "dropout": 0.0} | knobs
        model = train.build_model(shape, vocab)
        torch.manual_seed(4)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.2 * torch.randn_like(weight)
        return model

    def grads(model):
        return torch.cat([w.grad.flatten() for w in model.parameters() if w.grad is not None])

    argv = [f"--{name}={value}" for name, value in flags.items()]
    with (
        tempfile.TemporaryDirectory() as scratch,
        train.build([*argv, f"--out_dir={scratch}/a"]) as run,
    ):
        # the model, by itself
        x = torch.randint(64, (1, 32))
        for length, training in ((32, True), (32, False), (530, False)):
            model = noisy(block_size=length).train(training)
            x = torch.randint(64, (1, length))
            with torch.no_grad():
                whole = model(x)
                leak = 0.0
                for place in (1, 3, 5, 8, 13, 17, 22, 26, 31, length - 1):
                    other = x.clone()
                    other[0, place] = (other[0, place] + 1) % 64
                    leak = max(leak, (model(other) - whole)[:, :place].abs().max().item())
            found[f"own causality {length} {training}"] = leak < 1e-4
        model = noisy().eval()
        x = torch.randint(64, (3, 32))
        with torch.no_grad():
            logits = model(x)
            found["own sequences apart"] = torch.allclose(logits[:1], model(x[:1]), atol=1e-4)
            last = model(x[:, :9], last_only=True)[:, -1]
            found["own last logits"] = torch.allclose(last, logits[:, 8], atol=1e-3)
            for how in ({"temperature": 0}, {"temperature": 0.7}, {"temperature": 1.0, "top_k": 3}):
                mine = x[:1, :30]
                generator = torch.Generator().manual_seed(5)
                for _ in range(4):
                    last = model(mine[:, -32:])[:, -1].float()
                    if how.get("top_k"):
                        last[last < last.topk(3).values[:, -1:]] = -math.inf
                    if how["temperature"]:
                        shares = F.softmax(last / how["temperature"], -1)
                        new = shares.multinomial(1, generator=generator)
                    else:
                        new = last.argmax(-1, keepdim=True)
                    mine = torch.cat([mine, new], 1)
                generator = torch.Generator().manual_seed(5)
                drawn = list(
                    train.generate(model, x[:1, :30], 4, 32, 64, generator=generator, **how)
                )
                found[f"own sampling {how}"] = torch.equal(torch.cat(drawn, 1), mine[:, 30:])
        for vocab, rows, training in ((64, 3, True), (64, 3, False), (1100, 500, True)):
            model = noisy(vocab, n_layer=1).train(training)
            x, y = torch.randint(vocab, (2, rows, 32))
            y[0, :7] = -100
            loss = model(x, y)
            loss.backward()
            mine = grads(model)
            model.zero_grad()
            own = F.cross_entropy(model(x).float().flatten(0, 1), y.flatten())
            own.backward()
            close = abs(loss.item() / own.item() - 1) < 1e-3
            same = (mine - grads(model)).norm() < 1e-2 * mine.norm()
            found[f"own loss {vocab} {training}"] = bool(close and same)
        model = noisy()
        x, y = torch.randint(64, (2, 2, 32))
        found["logits"] = flat([model(x)])
        model(x, y).backward()
        found["gradient"] = flat(
            [w.grad if w.grad is not None else 0 * w for w in model.parameters()]
        )
        model = noisy(dropout=0.3)
        with torch.no_grad():
            found["own dropout"] = not torch.equal(model(x), model(x))
            model.eval()
            found["own no dropout"] = torch.equal(model(x), model(x))
        pair = []
        for again in (True, False):
            model = noisy(dropout=0.3, grad_checkpoint=again)
            torch.manual_seed(6)
            model(x, y).backward()
            pair.append(grads(model))
        found["own recomputed"] = bool((pair[0] - pair[1]).norm() < 1e-3 * pair[0].norm())
        model = noisy()
        with FlopCounterMode(display=False) as counter:
            model(x, y).backward()
        counted = counter.get_total_flops() / y.numel()
        found["own flops"] = abs(train.flops_per_token(model) / counted - 1) < 0.1

        # the data, the schedule
        found["rates"] = [train.lr_at(step) for step in range(0, 100, 2)]
        found["rows"] = [train.rows_at(step) for step in range(3)]
        length = len(run.train_data)
        for place, count in ((0, 40), (length - 3, 7), (3 * length - 1, 3)):
            found[f"windows {place}"] = flat(run.train_data[place, count])
        found["validation windows"] = flat(t for t in run.val_data[0, len(run.val_data)])

        # the step, the evaluation, the optimizer: on the same weights
        torch.manual_seed(7)
        with torch.no_grad():
            for weight in run.model.parameters():
                weight += 0.05 * torch.randn_like(weight)
        run.ema = {n: w.detach().clone() for n, w in run.model.named_parameters()}
        train.ema_decay = 0.7
        run.state["micro_batch"] = 3
        before = {n: w.detach().clone() for n, w in run.model.named_parameters()}
        numbers, rows = [], []
        for step in range(3):
            batch = [torch.as_tensor(t) for t in run.train_data[8 * step, 8]]
            batch[1] = batch[1].clone()
            batch[1][0, : 5 * step] = -100
            row = train.train_step(run.model, run, *batch, 1e-2)
            numbers += [row["loss"], row["grad_norm"], row["skipped"], row["targets"]]
            rows += train.count_batch(run, batch[1]).values()
            if step == 0:
                moves = {n: w.detach() - before[n] for n, w in run.model.named_parameters()}
        found["numbers of steps"], found["rows of steps"] = flat(numbers), flat(rows)
        found["moves"] = [flat([move]) for move in moves.values()]
        found["averages"] = flat(run.ema.values())
        found["evaluation"] = flat(v for _, v in sorted(train.evaluate(run).items()))
        hook = next(run.model.parameters()).register_hook(lambda g: g * math.nan)
        before = [w.detach().clone() for w in run.model.parameters()]
        train.train_step(run.model, run, *batch, 1e-2)
        hook.remove()
        found["own skip"] = all(map(torch.equal, before, run.model.parameters()))
        rates = [{g["lr"] / g.get("lr_scale", 1) for g in o.param_groups} for o in run.optimizers]
        found["group rates"] = [rate for each in rates for rate in sorted(each)]
        held = [id(w) for o in run.optimizers for g in o.param_groups for w in g["params"]]
        found["own groups"] = sorted(held) == sorted(map(id, run.model.parameters()))
        decays = [g["weight_decay"] for o in run.optimizers for g in o.param_groups]
        found["decays"] = sorted(decays)
        bests = []
        for loss in (3.0, 2.0, 2.5, 1.0, 1.0):
            bests.append(train.count_evaluation({"val_loss": loss}, run.state))
            bests += [run.state["best_val_loss"], run.state["evals_since_best"]]
        found["bests"] = flat(bests)
        train.ema_decay = 0.0

    # a run, whole and resumed
    digests = []
    with tempfile.TemporaryDirectory() as scratch:
        few = [*argv, "--max_steps=4", "--decay_steps=4", "--warmup_steps=2", "--dropout=0.1"]
        few += ["--accum_steps=2", "--ema_decay=0.5", "--eval_interval=1", "--log_interval=0"]
        for name, stops in (("whole", [4]), ("resumed", [2, 4])):
            for stop in stops:
                train.main([*few, f"--out_dir={scratch}/{name}", f"--max_steps={stop}"])
            lines = (Path(scratch, name, "metrics.jsonl")).read_text().splitlines()
            saved = [json.loads(line) for line in lines]
            digests.append([r.get("sha256") for r in saved if r.get("event") == "saved"][-1])
            found[f"rates of {name}"] = [r["lr"] for r in saved if r["kind"] == "train"]
            found[f"tokens of {name}"] = [r["tokens"] for r in saved if r["kind"] == "train"]
            losses = [r["val_loss"] for r in saved if r["kind"] == "eval"]
        best = torch.load(f"{scratch}/whole/best.pt", weights_only=True)["state"]["step"]
        found["own best"] = best == int(np.argmin(losses))
    found["own resume"] = digests[0] == digests[1]

    # how well it learns, judged by the sound windows of the file
    text = np.fromfile(f"{data_dir}/small/val.bin", "uint16").astype(np.int64)
    rows = torch.from_numpy(text[: 33 * 150].reshape(150, 33))
    losses = []
    for seed in seeds:
        with tempfile.TemporaryDirectory() as scratch:
            more = [f"--seed={seed}", f"--out_dir={scratch}/a"]
            with train.build([*argv, *more]) as run:
                for step in range(train.max_steps):
                    first, count = run.state["sequences"], train.rows_at(step)
                    batch = [torch.as_tensor(t) for t in run.train_data[first, count]]
                    train.train_step(run.model, run, *batch, train.lr_at(step))
                    train.count_batch(run, batch[1])
                run.model.eval()
                with torch.no_grad():
                    logits = run.model(rows[:, :-1])
                losses.append(F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item())
    found["loss"] = losses
    return found


MODEL_ONLY = ("logits", "gradient", "moves", "loss")


def verdict_of(file, found, sound):
    """(broken | worse | neutral, why), by the rule above."""

    def same(name, tolerance=1e-3):
        one, other = found.get(name), sound[name]
        if len(one) != len(other):
            return False
        pairs = list(zip(one, other, strict=True))
        distance = math.sqrt(sum((a - b) ** 2 for a, b in pairs))
        return distance <= tolerance * (math.sqrt(sum(b * b for _, b in pairs)) + 1e-12)

    broken = [name for name, value in found.items() if name.startswith("own") and value is False]
    if same("logits", 1e-5) and not same("gradient", 1e-2):
        broken.append("gradient")
    numeric = [name for name in sound if not name.startswith("own") and name not in MODEL_ONLY]
    if file == "optim.py":
        moves = zip(found["moves"], sound["moves"], strict=True)
        cosines = [sum(map(float.__mul__, one, other)) / norms(one, other) for one, other in moves]
        broken += ["direction of the update"] * (min(cosines) < 0.98)
        numeric = ["decays"]
    if file == "model.py":  # its numbers are its own
        shared = ("rates", "rows", "windows", "validation", "bests", "tokens", "decays")
        numeric = [name for name in numeric if name.startswith(shared)]
    broken += [name for name in numeric if not same(name)]
    if broken:
        return "broken", broken[0]
    if not found["loss"][0] <= max(sound["loss"]):
        return "worse", f"{found['loss'][0]:.4f} for {max(sound['loss']):.4f}"
    return "neutral", ""


def norms(one, other):
    return math.sqrt(sum(a * a for a in one) * sum(b * b for b in other)) or math.inf


# ---- run them ------------------------------------------------------------------------------------


def in_child(folder, work):
    """(result of work(), seconds, error) in a fork of this process, in a copy of the repository."""
    results = Path(folder) / "result.json"
    results.unlink(missing_ok=True)
    began = time.monotonic()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        signal.alarm(TIMEOUT)
        null = os.open(Path(folder) / "output.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(null, 1)
        os.dup2(null, 2)
        try:
            os.chdir(folder)
            sys.path[:] = [str(folder), *(p for p in sys.path if not p.startswith(str(REPO)))]
            sys.argv = ["check.py"]
            results.write_text(json.dumps(work()))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    os.waitpid(pid, 0)
    seconds = time.monotonic() - began
    if results.exists():
        return json.loads(results.read_text()), seconds, None
    lines = (Path(folder) / "output.txt").read_text(errors="replace").strip().splitlines()
    return None, seconds, lines[-1] if lines else "killed"


def copy_of_repository(folder):
    ignored = shutil.ignore_patterns(
        ".git", "out", "data", "docs", "records", "tests", "__pycache__", ".*"
    )
    shutil.copytree(REPO, folder, ignore=ignored)


def run_check(data_dir, folder, *more, config=CONFIG):
    import check

    flags = config | {"data_dir": data_dir, "out_dir": f"{folder}/out"}
    began = time.process_time()
    code = check.main([*(f"--{name}={value}" for name, value in flags.items()), *more])
    marks = json.loads(Path(folder, "out", "check.json").read_text())["sanity"]["checks"]
    faults = [name for name, each in marks.items() if each["mark"] == "✗"]
    return {"code": code, "faults": faults, "cpu": time.process_time() - began}


def run_sound(data_dir, out):
    """check.py on loops without a bug, each in a copy of its own."""
    plain = {"n_embd": 64, "n_head": 4, "ngram_rows": 0, "conv_width": 1, "n_future_tokens": 1}
    done = out.read_text().splitlines() if out.exists() else []
    for words in SOUND.splitlines()[len(done) :]:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch, "copy")
            copy_of_repository(folder)
            if not words.startswith("--"):
                patch = REPO / "tests" / "hacks" / f"{words}.patch"
                subprocess.run(["patch", "-sp1", "-i", patch], cwd=folder, check=True)
            flags = words.split() if words.startswith("--") else []

            def work(folder=folder, flags=flags):
                return run_check(data_dir, folder, *flags, config=CONFIG | plain)

            result, seconds, error = in_child(folder, work)
            row = {"what": words, "seconds": seconds, "error": error} | (result or {"code": 1})
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(words, row["code"], row.get("faults"), error, f"{seconds:.0f} s", flush=True)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    print(f"NO-GO: {sum(row['code'] != 0 for row in rows)} of {len(rows)} sound loops")


def main():
    options = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:])
    if "table" in options:
        return print_table(options["table"])
    data_dir, out = options["data_dir"], Path(options.get("out") or options["sound"])
    import torch  # before the forks
    import torch._dynamo
    import torch.utils.flop_counter  # noqa: F401

    torch.set_num_threads(1)
    if "sound" in options:
        return run_sound(data_dir, out)
    done = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    with tempfile.TemporaryDirectory() as scratch:
        sound_folder = Path(scratch, "sound")
        copy_of_repository(sound_folder)
        seeds = (1337, *range(1, 10))
        sound, seconds, error = in_child(sound_folder, lambda: observe(data_dir, seeds))
        assert sound, error
        wrong = [name for name, value in sound.items() if value is False]
        print(f"sound: {seconds:.0f} s, {sorted(sound['loss'])}, {wrong}", flush=True)
        assert not wrong and verdict_of("train.py", sound, sound) == ("neutral", "")
        order = drawn(int(options.get("count", 220)), int(options.get("seed", 1)))
        for number, (mutant, source) in enumerate(order):
            if number < len(done):
                continue
            folder = Path(scratch, f"m{number}")
            copy_of_repository(folder)
            (folder / mutant["file"]).write_bytes(source)
            found, seconds, error = in_child(folder, lambda: observe(data_dir))
            mutant |= {"is": "raises", "why": error}
            if found:
                mutant["is"], mutant["why"] = verdict_of(mutant["file"], found, sound)
            if mutant["is"] in ("broken", "worse"):
                result, seconds, error = in_child(folder, lambda f=folder: run_check(data_dir, f))
                mutant |= {"seconds": seconds, "check": result or {"code": 1, "faults": [error]}}
            shutil.rmtree(folder)
            with out.open("a") as file:
                file.write(json.dumps(mutant) + "\n")
            code = mutant.get("check", {}).get("code", "")
            print(
                number,
                mutant["file"],
                mutant["kind"],
                mutant["line"],
                mutant["is"],
                code,
                flush=True,
            )
    return print_table(out)


def print_table(path):
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    print(f"{len(rows)} mutants: {dict(Counter(row['is'] for row in rows))}")
    bugs = [row for row in rows if row["is"] in ("broken", "worse")]
    for key in ("kind", "file", "is"):
        print(f"\n| {key} | bugs | NO-GO |\n|---|--:|--:|")
        for name in sorted({row[key] for row in bugs}):
            group = [row for row in bugs if row[key] == name]
            print(f"| {name} | {len(group)} | {sum(row['check']['code'] == 1 for row in group)} |")
    found = sum(row["check"]["code"] == 1 for row in bugs)
    seconds = sorted(row["seconds"] for row in bugs) or [0.0]
    print(f"\n{found} of {len(bugs)} found: {found / max(1, len(bugs)):.0%}", end="; ")
    print(f"{seconds[len(seconds) // 2]:.0f} s in the median, {seconds[-1]:.0f} at most")
    for row in bugs:
        if row["check"]["code"] != 1:
            print(
                f"missed: {row['file']}:{row['line']} {row['old']!r} -> {row['new']!r} ({row['why']})"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
