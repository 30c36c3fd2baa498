"""plain.py computes what train.py computes, with nothing behind it."""

import ast
import re
import runpy
import sys

import pytest
import torch
from conftest import REPO, TINY

from plumbing.cli import read_knobs

SOURCE = ast.parse((REPO / "plain.py").read_text(encoding="utf-8"))
RESOLVED = ("device", "dtype", "compile")  # train.py's default is "auto"
CASES = [
    "--optimizer=adamw --dropout=0.1",
    "--optimizer=muon --schedule=linear --accum_steps=3 --ngram_rows=64 --conv_width=3",
    "--optimizer=adam --weight_decay=0.5 --dtype=bfloat16",
    "--optimizer=momentum --grad_clip=0 --n_layer=2",
    "--optimizer=sgd --eval_interval=5",
]


def knobs_of_plain():
    """{name: value, or None where an expression computes it} of the globals before main()."""
    knobs = [node for node in SOURCE.body if isinstance(node, ast.Assign)]
    return {knob.targets[0].id: getattr(knob.value, "value", None) for knob in knobs}


@pytest.fixture
def run_plain(data_dir, tmp_path, monkeypatch, capsys):
    """run_plain(*flags) -> (its last weights, {(kind, step): loss as printed})."""

    def run(*flags):
        words = [f"--{name}={value}" for name, value in TINY.items() if name in knobs_of_plain()]
        monkeypatch.setattr(sys, "argv", ["plain.py", *words, "--log_interval=1", *flags])
        monkeypatch.chdir(tmp_path)
        if not (tmp_path / "data").exists():
            (tmp_path / "data").symlink_to(data_dir)
        monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.bfloat16)  # is put back
        with torch.random.fork_rng():
            runpy.run_path(str(REPO / "plain.py"), run_name="__main__")
        lines = re.findall(r"step (\d+)  (val loss|loss) (\S+)", capsys.readouterr().out)
        losses = {(kind, int(step)): float(loss) for step, kind, loss in lines}
        return torch.load(tmp_path / "plain.pt"), losses

    yield run
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("flags", CASES)
def test_plain_computes_the_bits_of_train(run_train, run_plain, flags):
    done = run_train("run", *flags.split())
    weights, losses = run_plain(*flags.split())
    expected = torch.load(done.checkpoint(12))["model"]
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    logged = {("loss", row["step"]): row["loss"] for row in done.rows("train")}
    logged |= {("val loss", row["step"]): row["val_loss"] for row in done.rows("eval")}
    assert losses == pytest.approx(logged, abs=5.1e-5)  # four digits are printed
    other, _ = run_plain(*flags.split(), "--seed=7")
    assert not all(torch.equal(weights[name], other[name]) for name in other)


def test_plain_has_the_defaults_of_train():
    train = read_knobs(REPO / "train.py")
    own = {name: value for name, value in knobs_of_plain().items() if name in train}
    assert len(own) > 20
    differing = {name for name, value in own.items() if value != train[name].default}
    assert differing == {*RESOLVED}


def test_plain_imports_nothing_but_the_model():
    nodes = [node for node in ast.walk(SOURCE) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in nodes
        for alias in node.names
    }
    assert names - sys.stdlib_module_names == {"numpy", "torch", "model"}
