"""bench.py measures what train.py runs, in every part, and changes nothing that it does not own."""

import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import REPO, tree, wait_for

import bench
import model
import train
from plumbing import console

SHAPE = {"n_layer": 2, "n_embd": 64, "n_head": 2, "block_size": 32, "batch_size": 32}
FLAGS = SHAPE | {
    "dataset": "small",
    "device": "cpu",
    "compile": "false",
    "warmup_steps": 0,
    "peak_lr": 1e-2,
    "save_interval": 50,
    "rounds": 1,
    "timing_seconds": 0.05,
    "lr_steps": 20,
}
PARTS = ["peak", "ladder", "profile", "memory", "overhead", "sanity", "lr"]
CHECKS = [
    "one batch overfits",
    "loss at initialization",
    "gradients reach every parameter",
    "gradient norm in range",
    "no look into the future",
    "targets are the tokens one place on",
    "utilization",
    "learning rate",
    "memory of a step",
    "what fits",
    "hours and cost",
]


def arguments(out_dir, data_dir, **flags):
    flags = FLAGS | {"out_dir": out_dir, "data_dir": data_dir} | flags
    return [f"--{key}={value}" for key, value in flags.items()]


@pytest.fixture(scope="module")
def whole(data_dir, tmp_path_factory):
    """All parts in one process, with an out_dir that holds a run: (bench.json, output, before, after)."""
    out_dir = tmp_path_factory.mktemp("bench") / "run"
    out_dir.mkdir()
    for name in ("run.json", "metrics.jsonl", "ckpt_00000005.pt"):
        (out_dir / name).write_text("not to be touched")
    before = tree(out_dir)
    command = [sys.executable, str(REPO / "bench.py"), *arguments(out_dir, data_dir, trace="true")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return json.loads((out_dir / "bench.json").read_text()), output, before, tree(out_dir)


@pytest.fixture
def in_process(data_dir, tmp_path):
    """bench.main() with the given flags, here: (exit code, bench.json)."""

    def run(**flags):
        code = bench.main(arguments(tmp_path / "b", data_dir, **flags))
        return code, json.loads((tmp_path / "b" / "bench.json").read_text())

    return run


def numbers(value):
    """Every number in nested dicts and lists."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [value] if isinstance(value, int | float) else []


def test_every_part_reports_in_json_and_on_the_console(whole):
    facts, output, _, _ = whole
    assert [part for part in facts if part in bench.PARTS] == PARTS  # exact only where it is named
    for part in PARTS:
        assert f"\n{part}:" in output
        assert numbers(facts[part])
        assert all(map(math.isfinite, numbers(facts[part])))
    assert facts["versions"]["torch"] == torch.__version__
    count = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]  # not in here:
    # other tests change it in this process
    assert facts["hardware"]["threads"] == int(subprocess.check_output(count))
    assert facts["date"] and facts["config"]["n_embd"] == 64


def test_it_says_first_how_long_it_takes_and_makes_no_other_noise(whole):
    lines = whole[1].splitlines()
    said = next(number for number, line in enumerate(lines) if line.startswith("takes    about "))
    assert said < lines.index(next(line for line in lines if line.startswith("peak:")))
    assert ", ".join(PARTS) in lines[said]
    assert "USDT" not in whole[1] and "CPUAllocator" not in whole[1]


def test_a_run_that_lies_in_out_dir_is_left_alone(whole):
    _, _, before, after = whole
    assert {name: after[name] for name in before} == before
    assert set(after) - set(before) == {"bench.json", "lr.png", "trace.json"}
    assert after["lr.png"].startswith(b"\x89PNG")
    names = {event.get("name") for event in json.loads(after["trace.json"])["traceEvents"]}
    assert {"forward", "forward_backward", "train_step", "data", "aten::mm"} <= names


def test_rates_are_those_of_a_real_machine(whole):
    peak = whole[0]["peak"]
    assert 1e9 < peak["bytes_per_sec"] < 1e14
    for rates in peak["flops_per_sec"].values():
        assert rates["datasheet"] is None  # a CPU has none
        assert all(1e8 < rate < 1e15 for size, rate in rates.items() if size != "datasheet")


def test_ladder_ratios_follow_from_its_times(whole):
    rungs = whole[0]["ladder"]["rungs"]
    assert "no CUDA" in rungs.pop("CUDA graph")["absent"]
    assert "absent" in rungs.pop("compile")
    timed = [rung for rung in rungs.values() if "absent" not in rung]
    assert len(timed) >= 4
    assert timed[0]["to_before"] == timed[0]["to_first"] == 1
    for before, rung in zip(timed, timed[1:], strict=False):
        assert rung["to_before"] == pytest.approx(before["ms"] / rung["ms"])
        assert rung["to_first"] == pytest.approx(timed[0]["ms"] / rung["ms"])
        assert rung["tokens_per_sec"] == pytest.approx(32 * 32 * 1000 / rung["ms"])
        assert 0 < rung["mfu"] < 1


def test_profile_accounts_for_the_whole_step(whole):
    profile = whole[0]["profile"]
    assert set(profile["shares"]) == {"forward", "backward", "optimizer", "data", "idle"}
    assert sum(profile["shares"].values()) == pytest.approx(1, abs=0.01)
    assert all(share >= 0 for share in profile["shares"].values())
    assert profile["shares"]["backward"] > profile["shares"]["data"]
    assert profile["shares"]["idle"] < 0.2
    costs = [operator["ms"] for operator in profile["operators"].values()]
    assert len(costs) == 10 and costs == sorted(costs, reverse=True)
    assert sum(costs) < 2 * profile["step_ms"] * profile["slowdown"]


def test_memory_is_predicted_within_15_percent(whole):
    memory = whole[0]["memory"]
    for row in memory["here"].values():
        assert row["predicted"] == pytest.approx(row["measured"], rel=0.15)
    plain, checkpointed = memory["here"].values()
    assert checkpointed["measured"] < plain["measured"]
    assert checkpointed["fits"] >= plain["fits"] > 32


def test_memory_prediction_also_holds_where_gradients_accumulate(in_process):
    _, facts = in_process(only="memory", accum_steps=2, batch_size=64, optimizer="momentum")
    for row in facts["memory"]["here"].values():
        assert row["predicted"] == pytest.approx(row["measured"], rel=0.15)


def test_known_sizes_need_what_the_arithmetic_says(whole):
    known = whole[0]["memory"]["known_sizes"]
    assert list(known) == ["GPT-2 124M", "GPT-2 1.5B", "Llama 7B", "Llama 70B"]
    for row in known.values():
        assert row["inference"] > 2 * row["parameters"]
        assert row["adamw"] > 16 * row["parameters"] * 0.75 and row["adamw"] > row["momentum"]
        assert row["sgd"] >= row["sgd, ckpt"] > 4 * row["parameters"]
    assert known["GPT-2 124M"]["sgd"] > known["GPT-2 124M"]["sgd, ckpt"]
    assert known["Llama 7B"]["parameters"] == pytest.approx(6.7e9, rel=0.05)


def test_overhead_is_measured_over_the_real_loop(whole):
    overhead = whole[0]["overhead"]
    assert all(overhead[key] > 0 for key in overhead if key.endswith("_ms"))
    assert overhead["over_bare"] > -1 and overhead["over_clipping"] > -1
    # one block: its ratio is that of its times
    assert overhead["loop_ms"] == pytest.approx(overhead["bare_ms"] * (1 + overhead["over_bare"]))
    share = overhead["audit_ms"] / overhead["loop_ms"]
    assert share / overhead["audit_interval"] <= 0.01 < share / (overhead["audit_interval"] - 1)


def test_the_bare_step_clips_or_does_not(monkeypatch):
    weight = torch.nn.Parameter(torch.zeros(4))
    run = SimpleNamespace(
        model=torch.nn.ParameterList([weight]),
        optimizers=[torch.optim.SGD([weight], lr=0.1)],
        scaler=torch.amp.GradScaler("cpu", enabled=False),
    )
    backward = [torch.full((4,), 50.0)]
    monkeypatch.setattr(train, "forward_backward", lambda *_: setattr(weight, "grad", *backward))
    for clips, norm in ((False, 100.0), (True, train.grad_clip)):
        backward = [torch.full((4,), 50.0)]
        bench.bare_step(None, run, None, weight, clips)
        assert weight.grad.norm().item() == pytest.approx(norm, rel=1e-4)
    assert weight.detach().sum() == pytest.approx(-0.1 * (200 + 2), rel=1e-4)


@pytest.mark.slow  # it compares seconds, which a busy machine disturbs
def test_overhead_sees_what_slows_the_loop_down(in_process, monkeypatch):
    monkeypatch.setattr(console.Table, "print_row", lambda *_: time.sleep(0.2))
    slow = in_process(only="overhead")[1]["overhead"]
    assert slow["loop_ms"] - slow["train_step_ms"] - slow["data_ms"] > 1
    assert slow["over_bare"] > 0.1


def test_a_healthy_model_is_go(whole):
    facts, stdout, _, _ = whole
    inputs, targets = facts["sanity"]["example"]
    assert inputs[1:] == targets[:-1] and len(targets) == 32
    assert list(facts["sanity"]["checks"]) == CHECKS
    assert all(check["ok"] for check in facts["sanity"]["checks"].values())
    assert facts["sanity"]["go"] and "\n  GO\n" in stdout and "✗" not in stdout
    for name in CHECKS:  # a line each, with what was found and what is good
        (line,) = [line for line in stdout.splitlines() if line[4:].startswith(f"{name}: ")]
        assert "; good: " in line


def test_the_range_test_of_both_parts_is_one(whole):
    suggested = whole[0]["lr"]["suggested_peak_lr"]
    assert f"suggests {suggested:g}" in whole[0]["sanity"]["checks"]["learning rate"]["found"]


def test_hours_and_cost_follow_from_the_step_and_the_length(in_process):
    _, facts = in_process(only="sanity", max_steps=10**6, dollars_per_hour=3)
    found = facts["sanity"]["checks"]["hours and cost"]["found"]
    words = r"([\d.]+) hours \(1,000,000 steps of ([\d.]+) ms, .*; \$([\d.]+) at \$3 an hour"
    hours, ms, money = map(float, re.match(words, found).groups())
    assert 3600 * hours == pytest.approx(1000 * ms, rel=0.5)  # evaluations come on top
    assert money == pytest.approx(3 * hours, abs=0.02)


def test_a_warning_is_still_go(in_process, monkeypatch):
    monkeypatch.setattr(bench.devices, "gpu_util", lambda device: 50)
    monkeypatch.setattr(bench.Job, "range_test", {"suggested_peak_lr": 0.5})
    code, facts = in_process(only="sanity")
    checks = facts["sanity"]["checks"]
    assert checks["utilization"]["warning"] and "GPU busy 50%" in checks["utilization"]["found"]
    assert checks["learning rate"]["warning"]
    assert [name for name, check in checks.items() if not check["ok"]] == []
    assert code == 0 and facts["sanity"]["go"]


def test_a_step_that_does_not_fit_is_no_go(in_process, monkeypatch, capsys):
    monkeypatch.setattr(bench.devices, "free_memory", lambda device: 1000)
    code, facts = in_process(only="sanity")
    checks = facts["sanity"]["checks"]
    assert [name for name, check in checks.items() if not check["ok"]] == [
        "memory of a step",
        "what fits",
    ]
    assert code == 1 and "NO-GO: memory of a step, what fits" in capsys.readouterr().out


def test_the_predicted_memory_is_that_of_one_rank_of_all(in_process, monkeypatch):
    _, alone = in_process(only="memory", batch_size=1, optimizer="sgd")
    monkeypatch.setattr(bench, "world_size", lambda: 2)
    _, of_two = in_process(only="memory", batch_size=1, optimizer="sgd")
    alone, of_two = (
        facts["memory"]["here"]["without grad_checkpoint"] for facts in (alone, of_two)
    )
    # the flat buffer in which two ranks sum their gradients is larger than these activations
    assert of_two["activations"] == of_two["gradients"] > alone["activations"]


def see_the_future(monkeypatch):
    def attention(q, k, v, dropout):
        return F.scaled_dot_product_attention(q, k, v)

    monkeypatch.setattr(model, "causal_attention", attention)


def begin_far_off(monkeypatch):
    reset = model.GPT.reset_parameters

    def far_off(self):
        reset(self)
        self.head.weight.data.mul_(50)

    monkeypatch.setattr(model.GPT, "reset_parameters", far_off)


def cut_off_a_matrix(monkeypatch):
    def forward(self, x):
        gate, value = self.up(x).detach().chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)

    monkeypatch.setattr(model.MLP, "forward", forward)


def never_update(monkeypatch):
    monkeypatch.setattr(train, "step_unless", lambda skipped, optimizer: None)


def ask_for_the_input(monkeypatch):
    real = train.ShuffledWindows.__getitem__
    monkeypatch.setattr(train.ShuffledWindows, "__getitem__", lambda *args: (real(*args)[0],) * 2)


def blow_up_the_gradient(monkeypatch):
    real = model.GPT.forward

    def forward(self, tokens, targets=None):
        result = real(self, tokens, targets)
        return result if targets is None else result + 1e4 * (result - result.detach())

    monkeypatch.setattr(model.GPT, "forward", forward)


@pytest.mark.parametrize(
    ("fault", "check"),
    [
        (see_the_future, "no look into the future"),
        pytest.param(begin_far_off, "loss at initialization", marks=pytest.mark.slow),
        pytest.param(cut_off_a_matrix, "gradients reach every parameter", marks=pytest.mark.slow),
        (never_update, "one batch overfits"),
        pytest.param(
            ask_for_the_input, "targets are the tokens one place on", marks=pytest.mark.slow
        ),
        pytest.param(blow_up_the_gradient, "gradient norm in range", marks=pytest.mark.slow),
    ],
)
def test_sanity_finds_the_fault(fault, check, in_process, monkeypatch):
    fault(monkeypatch)
    code, facts = in_process(only="sanity")
    assert code == 1 and not facts["sanity"]["go"]
    assert not facts["sanity"]["checks"][check]["ok"]


def test_lr_range_test_suggests_a_rate_that_learns(whole):
    lr = whole[0]["lr"]
    assert len(lr["lr"]) == len(lr["loss"]) == len(lr["smooth"]) <= 20
    assert lr["lr"] == sorted(lr["lr"])
    assert 1e-5 < lr["suggested_peak_lr"] < 1
    assert min(lr["smooth"]) < lr["loss"][0] - 0.3


def test_all_is_as_before_afterwards(in_process):
    before = dict(vars(train)), list(sys.path), torch.are_deterministic_algorithms_enabled()
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    code, facts = in_process(only="overhead,lr")
    assert code == 0 and set(facts) & set(PARTS) == {"overhead", "lr"}
    assert (dict(vars(train)), list(sys.path)) == before[:2]
    assert torch.are_deterministic_algorithms_enabled() == before[2]
    assert handlers == [
        signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    ]


def test_an_error_in_a_part_leaves_no_worker_behind(in_process, monkeypatch):
    def fail(steps, device):
        assert len(multiprocessing.active_children()) == 2  # those of the rung with workers
        raise RuntimeError("in the midst of it")

    monkeypatch.setattr(bench, "interleaved", fail)
    with pytest.raises(RuntimeError, match="in the midst") as error:  # refers to the iterator
        in_process(only="ladder")
    assert error and multiprocessing.active_children() == []


# ---- exact ---------------------------------------------------------------------------------------


@pytest.mark.slow  # it starts eight processes, each of which imports torch
def test_exact_hashes_the_gradients_of_each_setting_alone_and_under_load(in_process, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # one process of load
    code, facts = in_process(only="exact", exact_seconds=1)
    exact = facts["exact"]
    names = ["eager", "eager, not deterministic", "eager, 1 thread", "eager, without AMX"]
    assert list(exact["rows"]) == names + [f"{name}, under load" for name in names]
    for row in exact["rows"].values():
        assert row["tries"] >= 1 and row["distinct"] == 1 and row["where"] == ""
    assert code == 0 and exact["differ"] == 0
    # weights and batch are the same in all of them
    assert len({row["bits"] for row in exact["rows"].values()}) == 1


def test_tries_find_a_bit_that_flips_and_name_its_tensor(in_process, monkeypatch):
    real = train.forward_backward
    calls = []

    def faulty(model, run, *batch):
        loss = real(model, run, *batch)
        calls.append(loss)
        if len(calls) == 3:  # the first one is the rehearsal
            run.model.head.weight.grad.view(torch.int32)[5, 7] ^= 1
        return loss

    monkeypatch.setattr(train, "forward_backward", faulty)
    _, facts = in_process(only="tries", exact_seconds=1, dropout=0.1)
    tries = facts["tries"]
    assert tries["tries"] == len(calls) - 1 >= 3
    assert (tries["distinct"], tries["differ"]) == (2, 1)
    assert tries["where"] == "head.weight"


def test_a_deterministic_setting_that_differs_is_exit_1(in_process, monkeypatch):
    row = {"tries": 5, "distinct": 2, "differ": 1, "bits": "0", "where": "head.weight"}

    def start(job, script, environment, wait=True, *, out_dir, **knobs):
        out_dir.mkdir(exist_ok=True)
        (out_dir / "bench.json").write_text(json.dumps({"tries": row}))

    monkeypatch.setattr(bench, "start", start)
    code, facts = in_process(only="exact")
    assert code == 1
    strict = [row for row in facts["exact"]["rows"].values() if row["deterministic"]]
    assert facts["exact"]["differ"] == len(strict) < len(facts["exact"]["rows"])


# ---- seeds ---------------------------------------------------------------------------------------


def test_seeds_are_runs_of_the_real_command(in_process, run_train, tmp_path, monkeypatch, capfd):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    knobs = {"max_steps": 8, "eval_interval": 4, "dtype": "float32", "report": "false"}
    _, facts = in_process(only="seeds", seeds=2, seed=5, **knobs)
    seeds = facts["seeds"]
    assert list(seeds["runs"]) == ["seed 5", "seed 6"]
    first, second = seeds["runs"].values()
    flags = [f"--{key}={value}" for key, value in (FLAGS | knobs).items() if hasattr(train, key)]
    losses = [row["val_loss"] for row in run_train("own", *flags, "--seed=6").rows("eval")]
    assert (second["final"], second["best"]) == (losses[-1], min(losses))
    assert first["final"] != second["final"]
    # 300 characters are 10 windows of 32: 160 targets, and the 139 that are left
    whole = (160 * second["first_half"] + 139 * second["second_half"]) / 299
    assert whole == pytest.approx(second["final"], rel=1e-6)
    assert second["first_half"] != pytest.approx(second["second_half"], rel=1e-4)
    for column in ("final", "best", "first_half", "second_half", "seconds"):
        one, other = first[column], second[column]
        assert seeds["mean"][column] == pytest.approx((one + other) / 2)
        assert seeds["median"][column] == pytest.approx((one + other) / 2)
        assert seeds["deviation"][column] == pytest.approx(abs(one - other) / math.sqrt(2))
        assert (seeds["lowest"][column], seeds["highest"][column]) == tuple(sorted((one, other)))
    assert [path for path in scratch.iterdir() if "torchinductor" not in path.name] == []
    assert f"{second['final']:.4f}  {second['best']:.4f}" in capfd.readouterr().out


def test_a_seed_that_fails_ends_it_with_what_it_said(in_process, tmp_path, monkeypatch):
    (tmp_path / "failing.py").write_text("print('the disk is full'); raise SystemExit(1)")
    real = subprocess.Popen
    fails = [sys.executable, tmp_path / "failing.py"]
    monkeypatch.setattr(subprocess, "Popen", lambda flags, **how: real(fails + flags[2:], **how))
    with pytest.raises(RuntimeError, match=r"--seed=1337 exited with 1:\nthe disk is full"):
        in_process(only="seeds")


# ---- stopped -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part",
    ["overhead", *(pytest.param(part, marks=pytest.mark.slow) for part in ("exact", "ladder"))],
)
def test_ctrl_c_ends_it_in_one_line(part, data_dir, tmp_path):
    flags = arguments(tmp_path / "b", data_dir, only=part, rounds=1000, exact_seconds=1000)
    command = [sys.executable, str(REPO / "bench.py"), *flags]
    streams = {"stdout": (tmp_path / "out").open("w"), "stderr": (tmp_path / "err").open("w")}
    streams["preexec_fn"] = restore_sigint  # a test suite in the background ignores it
    process = subprocess.Popen(command, **streams, start_new_session=True)
    try:
        wait_for(lambda: "takes    about" in (tmp_path / "out").read_text())
        time.sleep(2)  # into the part
        started = children(process.pid)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=30) == 130
    finally:
        process.kill()
    error = (tmp_path / "err").read_text()
    assert error.startswith("bench.py: stopped") and len(error.splitlines()) == 1
    assert part != "exact" or started
    wait_for(lambda: not any(map(alive, started)))


def restore_sigint():
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def children(pid):
    """Process ids of the children of a process."""
    lists = (f"/proc/{pid}/task/{task}/children" for task in os.listdir(f"/proc/{pid}/task"))
    return [int(child) for path in lists for child in open(path).read().split()]


def alive(pid):
    try:
        return "Z" not in open(f"/proc/{pid}/stat").read().rpartition(")")[2]
    except (FileNotFoundError, ProcessLookupError):
        return False


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"only": "peak,laddr"}, "'laddr'"),
        ({"n_head": 5}, "n_head=5"),
        ({"rounds": 0}, "--rounds=0"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(flags, named, in_process, tmp_path, capsys):
    with pytest.raises(SystemExit) as leaving:
        in_process(**flags)
    assert leaving.value.code == 2
    error = capsys.readouterr().err
    assert named in error and len(error.splitlines()) == 1
    assert not (tmp_path / "b").exists()
