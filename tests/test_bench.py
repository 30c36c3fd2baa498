"""bench.py measures what train.py runs, in every part, and changes nothing that it does not own."""

import contextlib
import io
import json
import math
import re
import signal
import subprocess
import sys
from statistics import median

import pytest
import torch
from conftest import REPO, run_python, tree, wait_for
from helpers import alive, children
from helpers import bench_arguments as arguments

import bench
import train
from plumbing.cli import BadInput, read_knobs

pytestmark = pytest.mark.usefixtures("small_products")
PARTS = ["peak", "ladder", "profile", "memory", "overhead"]


@pytest.fixture(scope="module")
def whole(small_products, data_dir, tmp_path_factory):
    """All parts, in the folder of a run: (bench.json, output, before, after)."""
    out_dir = tmp_path_factory.mktemp("bench") / "run"
    out_dir.mkdir()
    for name in ("run.json", "metrics.jsonl", "ckpt_00000005.pt"):
        (out_dir / name).write_text("not to be touched")
    before, output = tree(out_dir), io.StringIO()
    with contextlib.redirect_stdout(output):
        bench.main(arguments(out_dir, data_dir, trace="true"))
    facts = json.loads((out_dir / "bench.json").read_text())
    return facts, output.getvalue(), before, tree(out_dir)


@pytest.fixture
def in_process(data_dir, tmp_path):
    """bench.main() with the given flags, here: (exit code, bench.json)."""

    def run(**flags):
        code = bench.main(arguments(tmp_path / "b", data_dir, **{"n_layer": 1} | flags))
        return code, json.loads((tmp_path / "b" / "bench.json").read_text())

    return run


@pytest.mark.xdist_group("bench")
def test_every_part_reports_in_json_and_on_the_console(whole):
    facts, output, _, _ = whole
    assert [part for part in facts if part in bench.PARTS] == PARTS
    for part in PARTS:
        assert f"\n{part}:" in output
        assert re.search(r"\d", json.dumps(facts[part]))  # null stands for what is not finite
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["hardware"]["threads"] == torch.get_num_threads()
    assert facts["date"] and facts["config"]["n_embd"] == 64
    rungs = facts["ladder"]["rungs"]
    assert [*rungs][-2:] == ["2 workers", "not deterministic"] and "compile" not in rungs
    assert sum(facts["profile"]["shares"].values()) == pytest.approx(1)
    assert facts["profile"]["shares"]["backward"] > 0.1
    assert re.search(r"^ +aten::\w+ +[\d.]+%", output, re.MULTILINE)  # torch's own table


@pytest.mark.xdist_group("bench")
def test_a_run_that_lies_in_out_dir_is_left_alone(whole):
    _, _, before, after = whole
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"bench.json", "trace.json"}
    names = {event.get("name") for event in json.loads(after["trace.json"])["traceEvents"]}
    assert {"forward", "train_step", "data", "aten::mm"} <= names


@pytest.mark.xdist_group("bench")
def test_the_memory_of_a_larger_batch_is_predicted_within_5_percent(whole, in_process):
    before = whole[0]["memory"]["here"]
    _, facts = in_process(only="memory", n_layer=2, batch_size=64)
    for name, row in facts["memory"]["here"].items():
        assert row["micro_batch"] == 2 * before[name]["micro_batch"] == 64
        assert row["measured"] == pytest.approx(before[name]["twice"], rel=0.05)
        assert row["measured"] == row["weights"] + row["moments"] + row["passing"]
        assert row["measured"] > 1.5 * before[name]["measured"]  # control
        assert row["fits"] > 64
    plain, checkpointed = facts["memory"]["here"].values()
    assert checkpointed["measured"] < plain["measured"]


@pytest.mark.xdist_group("bench")
def test_overhead_is_that_of_whole_runs_over_plain(whole):
    overhead = whole[0]["overhead"]
    own, plain = (median(overhead["times"][f"{name}.py"]) for name in ("train", "plain"))
    assert own == pytest.approx(plain * (1 + overhead["over_plain"])) and plain > 0


@pytest.mark.parametrize("peak", [math.nan, 1e6])
def test_there_is_no_mfu_where_the_peak_is_unknown_or_exceeded(peak, in_process, monkeypatch):
    monkeypatch.setattr(bench.machine, "peak_flops", lambda *_: (peak, "of a busy machine"))
    _, facts = in_process(only="ladder")
    rungs = facts["ladder"]["rungs"].values()
    assert all(rung["mfu"] is None and rung["tflops"] > 0 for rung in rungs)


# ---- whole runs ----------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_no_run_outlives_the_process_that_waits_for_it(name):
    sleeps = (
        "from checks import processes; processes.output_of(['-c', 'import time; time.sleep(99)'])"
    )
    waiting = subprocess.Popen([sys.executable, "-c", sleeps], cwd=REPO, stderr=subprocess.DEVNULL)
    wait_for(lambda: children(waiting))
    (run,) = children(waiting)
    waiting.send_signal(signal.Signals[name])
    assert waiting.wait(20) != 0
    wait_for(lambda: not alive(run))


# ---- a fork's script -----------------------------------------------------------------------------

BIGRAM = f"""
import sys
sys.path.insert(0, {str(REPO)!r})
import torch, train
from model import cross_entropy
from plumbing.cli import run_script
class Bigram(torch.nn.Embedding):
    def forward(self, inputs, targets=None):
        logits = super().forward(inputs)
        return logits if targets is None else cross_entropy(logits, targets)
train.build_model = lambda knobs, vocab_size: Bigram(vocab_size, vocab_size)
"""
GUARDED = BIGRAM + 'if __name__ == "__main__":\n    sys.exit(run_script(train.main))\n'


def test_the_model_of_a_fork_is_measured_and_sampled_from(tmp_path, data_dir):
    fork, out = tmp_path / "bigram.py", tmp_path / "run"
    fork.write_text(GUARDED)
    few = ["--max_steps=3", "--report=false"]
    flags = [*arguments(out, data_dir), "--only=memory"]

    of_train = [flag for flag in flags if flag.split("=")[0][2:] in read_knobs(train.__file__)]
    assert run_python(fork, *of_train, *few).returncode == 0
    assert run_python("bench.py", f"--script={fork}", *flags).returncode == 0
    weights = json.loads((out / "bench.json").read_text())["memory"]["here"]
    vocab_size = json.loads((data_dir / "small" / "meta.json").read_text())["vocab_size"]
    assert {row["weights"] for row in weights.values()} == {4 * vocab_size**2}
    assert "--script=FILE" in run_python("sample.py", out).stderr
    assert len(run_python("sample.py", out, f"--script={fork}", "--max_new_tokens=40").stdout) > 40


@pytest.mark.parametrize(
    "source, problem",
    [
        ("", "no such file"),
        (f"{BIGRAM}train.main()", "as soon as"),
        ("FRESH_STATE = {}\ndef train_step(): 0", "a copy"),
    ],
    ids=["absent", "unguarded", "copy"],
)
def test_a_script_that_cannot_be_measured_is_one_line(source, problem, tmp_path, train_as_it_was):
    fork = tmp_path / f"fork_{problem[0]}.py"
    if source:
        fork.write_text(source)
    with pytest.raises(BadInput, match=problem):
        bench.main([f"--script={fork}", "--device=cpu"])


@pytest.mark.parametrize("flag, value", [("only", "peak,laddr"), ("n_head", 5), ("rounds", 0)])
def test_bad_input_is_one_line_and_writes_nothing(flag, value, in_process, tmp_path):
    with pytest.raises(BadInput) as error:
        in_process(**{flag: value})
    named = "'laddr'" if flag == "only" else f"{flag}={value}"
    assert named in str(error.value) and len(str(error.value).splitlines()) == 1
    assert not (tmp_path / "b").exists()
