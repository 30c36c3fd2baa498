"""How many bugs does check.py find? Each mutant is judged before check.py sees it.

    python tests/mutants.py --data_dir=DIR --count=220 --out=F --seed=1   # goes on where F ends
    python tests/mutants.py --data_dir=DIR --bugs=tests/bugs.toml --out=F # bugs of real repositories
    python tests/mutants.py --data_dir=DIR --sound=tests/sound.txt --out=F    # loops without a bug
    python tests/mutants.py --table=F

A mutant is one small edit, by an operator, in a function that computes. The rule that says what it
is, by its behaviour, before and without check.py:

- raises: it does not import and train. No bug that anybody would miss, and left out.
- broken: a contract below does not hold. Each compares the mutant with itself (the logits before a
  changed token; the loss with -log p of its own logits; a resume with the whole run), or, where the
  model is untouched, with the numbers of the sound code on the same weights and batches.
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
import tomllib
import traceback
from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # before the forks
import torch.nn.functional as F
from conftest import REPO, copy_of_repository, pydoc_text
from torch.utils.flop_counter import FlopCounterMode

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
SEEDS = (1337, *range(1, 10))  # of the sound loop
TIMEOUT = 90  # seconds


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


# ---- what a mutant is: in a process of its own, in a copy ----------------------------------------


class Observed:
    """What a repository in the working directory computes. found: {name: numbers}; "own ..." are
    True where a contract with itself holds, the others are compared with those of the sound
    code."""

    def __init__(self, data_dir, seeds=SEEDS[:1]):
        import train

        self.train = train
        self.found = {}
        self.argv = [*CONFIG, f"--data_dir={data_dir}"]
        with tempfile.TemporaryDirectory() as scratch:
            with train.build([*self.argv, f"--out_dir={scratch}/a"]) as run:
                self.model_alone()
                self.losses_and_gradients()
                self.sampling()
                self.data_and_schedule(run)
                self.steps(run)
            self.whole_runs(scratch)
        text = np.fromfile(f"{data_dir}/small/val.bin", "uint16").astype(np.int64)
        windows = torch.from_numpy(text[: 33 * 150].reshape(150, 33))
        self.found["loss"] = [self.short_run(seed, windows) for seed in seeds]

    def model(self, vocab=64, **knobs):
        """A new one without dropout, with noise on each weight."""
        from plumbing import cli

        shape = {n: getattr(self.train, n) for n in cli.read_knobs(self.train.__file__)}
        torch.manual_seed(3)
        shape |= {"dropout": 0.0} | knobs
        model = self.train.build_model(shape, vocab)
        for weight in model.parameters():
            weight.data += 0.2 * torch.randn_like(weight)
        return model

    @torch.no_grad()
    def model_alone(self):
        for length, training in ((32, True), (32, False), (530, False)):
            model = self.model(block_size=length).train(training)
            x = torch.randint(64, (1, length))
            leak = 0.0
            for place in (1, 3, 5, 8, 13, 17, 22, 26, 31, length - 1):
                other = x.clone()
                other[0, place] = (other[0, place] + 1) % 64
                leak = max(leak, (model(other) - model(x))[:, :place].abs().max().item())
            self.found[f"own causality {length} {training}"] = leak < 1e-4
        model = self.model().eval()
        x = torch.randint(64, (3, 32))
        logits = model(x)
        last = model(x[:, :9], last_only=True)[:, -1]
        self.found["own sequences apart"] = torch.allclose(logits[:1], model(x[:1]), atol=1e-4)
        self.found["own last logits"] = torch.allclose(last, logits[:, 8], atol=1e-3)

    @torch.no_grad()
    def sampling(self):
        model = self.model().eval()
        prompt = torch.randint(64, (1, 30))
        for how in ({"temperature": 0}, {"temperature": 0.7}, {"temperature": 1.0, "top_k": 3}):
            mine = prompt
            generator = torch.Generator().manual_seed(5)
            for _ in "1234":
                last = model(mine[:, -32:])[:, -1].float()
                if how.get("top_k"):
                    last[last < last.topk(3).values[:, -1:]] = -math.inf
                new = last.argmax(-1, keepdim=True)
                if how["temperature"]:
                    shares = F.softmax(last / how["temperature"], -1)
                    new = shares.multinomial(1, generator=generator)
                mine = torch.cat([mine, new], 1)
            generator = torch.Generator().manual_seed(5)
            drawn = self.train.generate(model, prompt, 4, 32, 64, generator=generator, **how)
            self.found[f"own sampling {how}"] = torch.equal(torch.cat([*drawn], 1), mine[:, 30:])

    def losses_and_gradients(self):
        for vocab, rows, training in ((64, 3, True), (64, 3, False), (1100, 500, True)):
            model = self.model(vocab, n_layer=1).train(training)
            x, y = torch.randint(vocab, (2, rows, 32))
            y[0, :7] = -100
            loss = model(x, y)
            told = gradient(model, loss)
            own = F.cross_entropy(model(x).float().flatten(0, 1), y.flatten())
            close = abs(loss.item() / own.item() - 1) < 1e-3
            same = (told - gradient(model, own)).norm() < 1e-2 * told.norm()
            self.found[f"own loss {vocab} {training}"] = bool(close and same)
        model = self.model()
        torch.manual_seed(8)
        x, y = torch.randint(64, (2, 2, 32))
        self.found["logits"] = flat([model(x)])
        with FlopCounterMode(display=False) as counter:
            self.found["gradient"] = flat([gradient(model, model(x, y))])
        counted = counter.get_total_flops() / y.numel()
        self.found["own flops"] = abs(self.train.flops_per_token(model) / counted - 1) < 0.1
        gradients = []
        for again in (True, False):
            model = self.model(dropout=0.3, grad_checkpoint=again)
            torch.manual_seed(6)
            gradients.append(gradient(model, model(x, y)))
        difference = (gradients[0] - gradients[1]).norm()
        self.found["own recomputed"] = bool(difference < 1e-3 * gradients[0].norm())
        with torch.no_grad():
            self.found["own dropout"] = not torch.equal(model(x), model(x))
            model.eval()
            self.found["own no dropout"] = torch.equal(model(x), model(x))

    def data_and_schedule(self, run):
        train = self.train
        self.found["rates"] = [train.lr_at(step) for step in range(0, 100, 2)]
        self.found["rows"] = [train.sequences_at(step) for step in range(3)]
        length = len(run.train_data)
        for place, count in ((0, 40), (length - 3, 7), (3 * length - 1, 3)):
            self.found[f"windows {place}"] = flat(run.train_data[place, count])
        self.found["validation windows"] = flat(run.val_data[0, len(run.val_data)])
        bests = []
        for loss in (3.0, 2.0, 2.5, 1.0, 1.0):
            bests.append(train.count_evaluation({"val_loss": loss}, run.state))
            bests += [run.state["best_val_loss"], run.state["evals_since_best"]]
        self.found["bests"] = flat(bests)

    def steps(self, run):
        """The step, the evaluation, the optimizer: on the same weights."""
        train = self.train
        torch.manual_seed(7)
        for weight in run.model.parameters():
            weight.data += 0.05 * torch.randn_like(weight)
        run.ema = {n: w.detach().clone() for n, w in run.model.named_parameters()}
        train.ema_decay = 0.7
        run.state["micro_batch"] = 3
        before = copied(run.model)
        numbers, rows = [], []
        for step in range(3):
            batch = [torch.as_tensor(t).clone() for t in run.train_data[8 * step, 8]]
            batch[1][0, : 5 * step] = -100
            row = train.train_step(run.model, run, *batch, 1e-2)
            numbers += [row["loss"], row["grad_norm"], row["skipped"], row["targets"]]
            rows += train.count_batch(run, batch[1]).values()
            if step == 0:
                pairs = zip(copied(run.model), before, strict=True)
                self.found["moves"] = [flat([one - other]) for one, other in pairs]
        self.found["numbers of steps"], self.found["rows of steps"] = flat(numbers), flat(rows)
        self.found["averages"] = flat(run.ema.values())
        self.found["evaluation"] = flat(v for _, v in sorted(train.evaluate(run).items()))
        hook = next(run.model.parameters()).register_hook(lambda g: g * math.nan)
        before = copied(run.model)
        train.train_step(run.model, run, *batch, 1e-2)
        hook.remove()
        self.found["own skip"] = all(map(torch.equal, before, copied(run.model)))
        groups = [group for optimizer in run.optimizers for group in optimizer.param_groups]
        self.found["group rates"] = sorted({g["lr"] / g.get("lr_scale", 1) for g in groups})
        held = [id(weight) for group in groups for weight in group["params"]]
        self.found["own groups"] = sorted(held) == sorted(map(id, run.model.parameters()))
        self.found["decays"] = sorted(group["weight_decay"] for group in groups)
        train.ema_decay = 0.0

    def whole_runs(self, scratch):
        """A run, whole and resumed."""
        few = "--max_steps=4 --decay_steps=4 --warmup_steps=2 --dropout=0.1 --accum_steps=2"
        few = [*self.argv, *few.split(), "--ema_decay=0.5", "--eval_interval=1", "--log_interval=0"]
        digests = []
        for name, stops in (("whole", [4]), ("resumed", [2, 4])):
            for stop in stops:
                self.train.main([*few, f"--out_dir={scratch}/{name}", f"--max_steps={stop}"])
            rows = [*map(json.loads, Path(scratch, name, "metrics.jsonl").read_text().splitlines())]
            digests.append([row["sha256"] for row in rows if row.get("event") == "saved"][-1])
            for field in ("lr", "tokens"):
                told = [row[field] for row in rows if row["kind"] == "train"]
                self.found[f"{field} of {name}"] = told
            losses = [row["val_loss"] for row in rows if row["kind"] == "eval"]
        best = torch.load(f"{scratch}/whole/best.pt", weights_only=True)["state"]["step"]
        self.found["own best"] = best == losses.index(min(losses))
        self.found["own resume"] = digests[0] == digests[1]

    def short_run(self, seed, windows):
        """The loss after it, on the sound windows of the file."""
        train = self.train
        with tempfile.TemporaryDirectory() as scratch:
            with train.build([*self.argv, f"--seed={seed}", f"--out_dir={scratch}/a"]) as run:
                for step in range(train.max_steps):
                    rows = run.train_data[run.state["sequences"], train.sequences_at(step)]
                    batch = [torch.as_tensor(part) for part in rows]
                    train.train_step(run.model, run, *batch, train.lr_at(step))
                    train.count_batch(run, batch[1])
                run.model.eval()
            with torch.no_grad():
                logits = run.model(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()


def flat(values):
    return [float(v) for each in values for v in torch.as_tensor(each).double().flatten()]


def copied(model):
    return [weight.detach().clone() for weight in model.parameters()]


def gradient(model, loss):
    """Of the loss; 0 for a weight that it does not reach."""
    model.zero_grad()
    loss.backward()
    weights = model.parameters()
    return torch.cat([(0 * w if w.grad is None else w.grad).detach().flatten() for w in weights])


def classify(file, found, sound):
    """(broken | worse | neutral, why), by the rule above."""

    def same(name, tolerance=1e-3):
        one, other = found[name], sound[name]
        if len(one) != len(other):
            return False
        return math.dist(one, other) <= tolerance * (math.hypot(*other) + 1e-12)

    broken = [name for name, value in found.items() if name.startswith("own") and value is False]
    if same("logits", 1e-5) and not same("gradient", 1e-2):
        broken.append("gradient")
    own = ("own", "logits", "gradient", "moves", "loss")
    numeric = [name for name in sound if not name.startswith(own)]
    if file == "optim.py":
        numeric = ["decays"]
        for one, other in zip(found["moves"], sound["moves"], strict=True):
            size = math.hypot(*one) * math.hypot(*other)
            if not float(np.dot(one, other)) > 0.98 * size:
                broken.append("direction of the update")
    if file == "model.py":  # its numbers are its own
        shared = ("rates", "rows", "windows", "validation", "bests", "tokens", "decays")
        numeric = [name for name in numeric if name.startswith(shared)]
    broken += [name for name in numeric if not same(name)]
    if broken:
        return "broken", broken[0]
    if not found["loss"][0] <= max(sound["loss"]):
        return "worse", f"{found['loss'][0]:.4f} for {max(sound['loss']):.4f}"
    return "neutral", ""


# ---- run them ------------------------------------------------------------------------------------


def in_child(folder, work):
    """(result of work(), error) in a fork of this process, in a copy of the repository."""
    results = Path(folder) / "result.json"
    results.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        signal.alarm(TIMEOUT)
        output = os.open(Path(folder) / "output.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
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
    if results.exists():
        return json.loads(results.read_text()), None
    lines = (Path(folder) / "output.txt").read_text(errors="replace").strip().splitlines()
    return None, lines[-1] if lines else "killed"


def run_check(folder, flags):
    """The faults that check.py finds in a copy, and the seconds of CPU that it takes."""

    def work():
        import check

        began = time.process_time()
        code = check.main(flags)
        checks = json.loads(Path(folder, "out", "check.json").read_text())["sanity"]["checks"]
        faults, warnings = (
            [name for name, each in checks.items() if each["mark"] == mark] for mark in "✗!"
        )
        cpu = time.process_time() - began
        return {"code": code, "faults": faults, "warnings": warnings, "cpu": cpu}

    result, error = in_child(folder, work)
    return result or {"code": 1, "faults": [error], "cpu": 0}


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
    torch.set_num_threads(1)
    data_dir = Path(options["data_dir"]).resolve()
    data_dir.mkdir(exist_ok=True)
    for name, text in TEXTS.items():
        if not (data_dir / name).exists():  # in a process: a fork of this one imports its own copy
            path = data_dir / f"{name}.txt"
            path.write_text(text)
            flags = f"--input={path}", f"--tokenizer={'byte' if name == 'bytes' else 'char'}"
            command = [sys.executable, "prepare_data.py", name, *flags, f"--data_dir={data_dir}"]
            subprocess.run(command, cwd=REPO, check=True)
    out = Path(options["out"])
    done = out.read_text().splitlines() if out.exists() else []
    sound = None
    with tempfile.TemporaryDirectory() as scratch:
        for number, (row, flags, path, new) in enumerate(cases(options)):
            if number < len(done):
                continue
            if "is" not in row and not sound:
                folder = Path(scratch, "sound")
                copy_of_repository(folder)
                sound, error = in_child(folder, lambda: Observed(data_dir, SEEDS).found)
                assert sound and classify("train.py", sound, sound) == ("neutral", ""), error
            folder = Path(scratch, str(number))
            copy_of_repository(folder)
            if new is not None:
                (folder / path).write_bytes(new)
            elif path:
                subprocess.run(["patch", "-sp1", "-i", path], cwd=folder, check=True)
            if "is" not in row:
                found, error = in_child(folder, lambda: Observed(data_dir).found)
                row["is"], row["why"] = "raises", error
                if found:
                    row["is"], row["why"] = classify(row["file"], found, sound)
            if row["is"] not in ("raises", "neutral"):
                own = [f"--data_dir={data_dir}", f"--out_dir={folder}/out"]
                row["check"] = run_check(folder, [*CONFIG, *own, *flags])
            shutil.rmtree(folder)
            with out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(number, json.dumps(row), flush=True)
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
    seconds = sorted(row["check"]["cpu"] for row in tried) or [0.0]
    found = sum(row["check"]["code"] for row in tried)
    print(f"\nNO-GO: {found} of {len(tried)}; {seconds[len(seconds) // 2]:.0f} s in the median, ")
    print(f"{seconds[-1]:.0f} at most. GO:")
    for row in tried:
        if not row["check"]["code"]:
            row.pop("check")
            print(f"  {json.dumps(row)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
