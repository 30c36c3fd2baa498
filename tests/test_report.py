"""The report: true to metrics.jsonl, whole for every kind of run, legible, and clear where it
cannot be."""

import json
import math
import os
import random
import re
import subprocess
import sys

import helpers
import numpy as np
import pytest
from conftest import REPO, copy_of_repository, make_dataset, read_rows
from helpers import RUNS, evaluation, event, eventful, falling, write_run
from sources import around

import report
from plumbing.cli import run_script
from reporting import curves, pictures, record, results
from reporting.record import read_run

STEPS = 24


@pytest.fixture(scope="session")
def real(tmp_path_factory, train_in):
    """The folder of a real run of STEPS steps."""
    folder = tmp_path_factory.mktemp("report")
    text = "The tortoise, as you know, was slow;\nbut it was honest: every step was written.\n" * 40
    make_dataset(folder, "tortoise", text)
    flags = (
        f"--dataset=tortoise --max_steps={STEPS} --warmup_steps=2 --eval_interval=8 "
        f"--log_interval=4 --n_embd=16 --save_interval=500 --data_dir={folder}"
    )
    done = train_in(folder, "run", *flags.split())
    return done.out_dir


def words_of(run):
    with np.errstate(all="ignore"):
        return report.words(run, image=[1])


def values_of(run):
    """{what: words} of the results."""
    with np.errstate(all="ignore"):
        return {what: words for what, (words, _) in results.outcome(run, 0.0).items()}


# ---- a real run ----------------------------------------------------------------------------------


def test_the_command_writes_a_picture_and_words(real):
    command = [sys.executable, REPO / "report.py", real]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == ""
    assert "report.png" in done.stdout and "report.md" in done.stdout
    assert (real / "report.png").read_bytes().startswith(b"\x89PNG")
    assert not list(real.glob("*.tmp"))
    text = (real / "report.md").read_text()
    best = min(read_rows(real, "eval"), key=lambda row: row["val_loss"])
    assert f"{best['val_loss']:.4f} at step {best['step']}" in text
    assert f"{best['val_bpb']:.4f}" in text and f"{best['val_accuracy']:.2%}" in text
    assert f"finished, at step {STEPS}" in text


def test_every_number_is_that_of_the_record(real):
    run, rows = read_run(real), read_rows(real, "train")
    for name in set(record.numbers_of("train")) - {"loss_scale"}:  # in float16 only
        recorded = [math.nan if row[name] is None else row[name] for row in rows]
        np.testing.assert_array_equal(run.train[name], np.array(recorded, float))
    outcome = values_of(run)
    seconds = sum(row["step_ms"] for row in rows) / 1000
    throughput = float(outcome["throughput, tokens/s"].replace(",", ""))
    assert throughput == pytest.approx(rows[-1]["tokens"] / seconds, rel=1e-3)
    run.train["mfu"] = np.linspace(0.1, 0.9, STEPS)
    assert values_of(run)["MFU"] == f"{STEPS / sum(1 / run.train['mfu']):.1%}"
    assert outcome["tokens trained on"] == f"{rows[-1]['tokens']:,}"
    over = {what: window for what, (_, window) in results.outcome(run, 0.0).items()}
    assert over["throughput, tokens/s"] == f"all {STEPS} steps; without evaluation and saving"
    assert over["mean training loss, nats"] == "the last 3 steps"
    assert {what for what, window in over.items() if not window} == {"how it ended"}
    spent, missing = results.seconds_by_kind(run)
    assert spent == read_rows(real, "event")[-1]["seconds"] and not missing


def test_a_run_on_another_text_than_asked_for_says_so_first(real, tmp_path):
    assert "INSTEAD" not in words_of(read_run(real))
    info = json.loads((real / "run.json").read_text())
    info["config"] |= {"dataset": "shakespeare", "offline_dataset": "tortoise"}
    run = read_run(write_run(tmp_path / "run", read_rows(real, "train"), **info))
    text = words_of(run)
    assert "'tortoise' INSTEAD OF 'shakespeare'" in text[: text.index("## Result")]
    info["config"]["offline_dataset"] = "pydoc"  # a fork that names its data otherwise
    run = read_run(write_run(tmp_path / "run", read_rows(real, "train"), **info))
    assert "INSTEAD" not in words_of(run)


# ---- records that are not whole ------------------------------------------------------------------


def test_damaged_lines_are_left_out_and_counted(real, tmp_path):
    whole = (real / "metrics.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    bad = [b"\0\0\0\n", b"1,2\n", b'{"kind": "train", "step": "x"}\n', b"[[[\n", b"\xff\n"]
    bad += [b'{"kind": "train", "step": 3, "gr!d_norm": 1.5}\n']
    lines[5:5] = bad
    lines.append(b'{"kind": "train", "step": 25, "lo')  # a last line that is half written
    write_run(tmp_path, [])
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
    run, expected = read_run(tmp_path), read_run(real)
    assert run.unreadable == len(bad) - 1 and results.new_fields(run) == []
    assert run.events == expected.events
    np.testing.assert_equal(run.evals, expected.evals)
    np.testing.assert_equal(run.train["step"], expected.train["step"])
    assert "5 damaged line(s)" in words_of(run)


def test_of_two_rows_of_a_step_the_later_one_counts(tmp_path):
    losses = [(1, 4.0), (2, 3.0), (3, 2.0), (2, 3.5), (3, 2.5)]
    rows = [helpers.row(step, loss) for step, loss in losses]
    run = read_run(write_run(tmp_path, rows))
    assert run.train["step"].tolist() == [1, 2, 3]
    assert run.train["loss"].tolist() == [4.0, 3.5, 2.5]


def test_a_fork_that_evaluates_a_part_is_not_said_to_see_the_whole(run_train):
    fork = around("evaluate", then="result['val_tokens'] = 64")
    assert "val_bpb" in run_train("whole", "--max_steps=3").rows("eval")[0]
    row = run_train("part", "--max_steps=3", before=fork).rows("eval")[0]
    assert row["val_tokens"] == 64 and "val_bpb" not in row
    silent = "train.evaluate = lambda run: {'val_loss': 1.0}"
    row = run_train("silent", "--max_steps=3", before=silent).rows("eval")[0]
    assert "val_tokens" not in row and "val_bpb" not in row


@pytest.mark.parametrize(
    "content, word",
    [
        (None, "no such folder"),
        ("folder", "no metrics.jsonl"),
        (b"", "is empty"),
        (b'{"kind": "trai', "damaged"),
        (bytes(range(256)) * 40, "damaged"),
        (b'{"loss": 1.5, "iter": 3}\n' * 9, "not from train.py"),
        (b"step,loss\n1,4.2\n2,4.1\n", "not from train.py"),
        (b"[" * 100_000, "damaged"),
    ],
)
def test_what_is_no_record_is_refused_in_one_line(tmp_path, content, word, capsys):
    folder = tmp_path / "run"
    if content is not None:
        folder.mkdir()
    if isinstance(content, bytes):
        (folder / "metrics.jsonl").write_bytes(content)
    assert run_script(lambda: report.main([str(folder)])) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1 and word in err and str(folder) in err
    assert not list(tmp_path.rglob("report.*"))


def test_any_damage_gives_a_report_or_one_clear_line(real, tmp_path):
    whole = (real / "metrics.jsonl").read_bytes()
    rng, read = random.Random(0), 0
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 10, 1000))):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        (tmp_path / "metrics.jsonl").write_bytes(damaged[: rng.randrange(len(damaged))])
        try:
            run = read_run(tmp_path)
        except ValueError as error:
            assert "\n" not in str(error)
        else:
            assert words_of(run)
            read += 1
    assert 20 < read < 150


WRONG = [None, 7, -1.5, 1e300, math.nan, True, "text\x1b[2J", [], [[]], {}, {"a": {"b": None}}]


def replaced(value, path, wrong):
    """A copy of nested dicts with `wrong` at a path."""
    head, *rest = path
    return value | {head: replaced(value[head], rest, wrong) if rest else wrong}


ENDLESS = ["[" * 50_000, '{"config": ' * 900 + "1" + "}" * 900, "", "null"]


@pytest.mark.parametrize("count", [1, pytest.param(len(WRONG), marks=pytest.mark.slow)])
def test_anything_in_run_json_gives_a_report(real, tmp_path, count):
    info = json.loads((real / "run.json").read_text())
    info["config"] = {"best_metric": "val_loss", "grad_clip": 1.0, "dataset": "tortoise"}
    paths = [[key] for key in info]
    paths += [[key, name] for key in info if isinstance(info[key], dict) for name in info[key]]
    paths += [["data", "meta", name] for name in info["data"]["meta"]]
    folder = write_run(tmp_path / "run", read_rows(real, "train") + read_rows(real, "eval"))
    rng = random.Random(0)
    for path in paths:
        for value in rng.sample(WRONG, count):
            (folder / "run.json").write_text(json.dumps(replaced(info, path, value)))
            run = read_run(folder)
            text = words_of(run)
            assert text and "\x1b" not in text and pictures.heading(run), (path, value)
    for text in ENDLESS:
        (folder / "run.json").write_text(text)
        assert "run.json is missing or damaged" in words_of(read_run(folder))


def test_events_with_anything_in_them_give_a_report(tmp_path):
    names = "step event ended seconds loss why tensors bits odd text micro_batch torch code".split()
    events = "end resume rollback audit sample skipped out_of_memory inexact_resume".split()
    rows = falling(30)
    for name in names:
        for i, wrong in enumerate(WRONG):
            rows.append(event(9, events[i % len(events)]) | {name: wrong})
            rows.append(falling(3)[2] | {name: wrong})
    run = read_run(write_run(tmp_path / "run", rows))
    assert "\x1b" not in words_of(run)
    drawn(pictures.picture, run)


@pytest.fixture
def command(capsys, monkeypatch):
    """command(*arguments) -> report.py with these arguments, in this process."""
    monkeypatch.setattr(sys, "argv", ["report.py"])

    def run(*arguments):
        capsys.readouterr()
        code = run_script(lambda: report.main([str(each) for each in arguments]))
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return run


def test_a_report_that_fails_says_so_in_a_line_and_in_its_exit_code(command, real, tmp_path):
    rows = read_rows(real, "train")
    taken = write_run(tmp_path / "taken", rows)
    (taken / "report.png").mkdir()
    for folder in (tmp_path / "nowhere", taken):
        done = command(folder)
        assert done.returncode > 0 and done.stdout == "", done.stderr
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("report.py: ")
    code = "import sys; sys.modules['matplotlib'] = None; import report; sys.exit(report.main())"
    folder = write_run(tmp_path / "plain", rows)
    python = [sys.executable, "-c", code, folder]  # as if matplotlib were not installed
    done = subprocess.run(python, cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "pip install matplotlib" in done.stderr and (folder / "report.md").is_file()


def test_where_train_has_another_name_report_works(real, tmp_path):
    copy = copy_of_repository(tmp_path / "copy")
    os.rename(copy / "train.py", copy / "mine.py")
    folder = write_run(tmp_path / "run", read_rows(real, "train"))
    subprocess.run([sys.executable, copy / "report.py", folder], check=True)


# ---- what happened -------------------------------------------------------------------------------


def test_every_event_is_in_the_report(tmp_path):
    run = read_run(write_run(tmp_path, eventful()))
    steps = {name: list(steps) for name, steps in curves.events_of(run).items()}
    assert steps == {
        "resume": [31, 40],
        "skipped": [20, 21, 25],
        "rollback": [40],
        "audit": [45],
        "out_of_memory": [30],
        "failed": [60],
    }
    text = words_of(run)
    for words in (
        "| 20 | skipped | 3 updates, the last at step 25; see `python replay.py",
        "--step=52 --before_rollback=1` |",
        "batch_size 4; accum_steps 2",
        "stopped by SIGINT",
        "why a loss spike; at_step 52",
        "threads was 2, is 1",
        "code changed in train.py",
        "step 45: audited, and the odd result dropped: odd first; bits 3; "
        "tensors ['gradient/head.weight']",
        "failed: no more. And so on",
        "1 session(s) recorded no times",
        "\n~~~~~~\nTo be\n~~~ or not\n~~~~~~\n",
    ):
        assert words in text, words
    assert "| changed |" not in text and values_of(run)["updates skipped"] == "3"
    assert results.seconds_by_kind(run) == ({"start": 2.0, "train": 4.0}, 1)
    assert results.ended(run) == "failed: no more, at step 60"
    rows = [event(0, "resume"), *falling(9), event(9, "end", seconds={})]
    fork = read_run(write_run(tmp_path, rows, run={"began_from": "best.pt"}))
    assert values_of(fork)["resumes"] == "0" and results.seconds_by_kind(fork) == ({}, 1)


def test_the_report_always_says_the_cost_or_how_to_ask_for_it(tmp_path, capsys):
    rows = [*falling(30), event(30, "end", ended="finished", seconds={"train": 1800.0})]
    free = read_run(write_run(tmp_path / "a", rows, hardware={"world_size": 4}))
    cost = values_of(free)["cost"]
    assert cost.startswith("2.000 device-hours") and "--dollars_per_hour=" in cost
    price = {"config": {"dollars_per_hour": 2.5}, "hardware": {"world_size": 4}}
    paid = read_run(write_run(tmp_path / "b", rows, **price))
    assert values_of(paid)["cost"].startswith("2.000 device-hours; $5.00 at $2.5 an hour")
    report.main([str(tmp_path / "a"), "--dollars_per_hour=3"])
    assert "2.000 device-hours; $6.00" in (tmp_path / "a" / "report.md").read_text()


def test_a_report_needs_no_torch(tmp_path):
    folder = write_run(tmp_path / "run", falling(40))
    code = "import sys, report; report.main(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, folder], cwd=REPO).returncode == 0


def test_another_metric_that_decides_is_named_wherever_the_best_is_told(tmp_path):
    accuracies = {0: 0.1, 10: 0.4, 20: 0.3}
    rows = [
        evaluation(step, 4 - 0.1 * step) | {"val_accuracy": a} for step, a in accuracies.items()
    ]
    config = {"config": {"best_metric": "-val_accuracy"}}
    run = read_run(write_run(tmp_path / "run", [*rows, *falling(20)], **config))
    assert results.best_of(run) == (0.4, 10)
    assert values_of(run)["best val_accuracy"] == "0.4000 at step 10"
    assert "best validation loss" not in words_of(run)
    # the best of a row that a rollback removed is in the state
    config["state"] = {"best_val_accuracy": 0.5, "best_step": 15}
    run = read_run(write_run(tmp_path / "run", [*rows, *falling(20)], **config))
    assert results.best_of(run) == (0.5, 15)


def drawn(picture, *args):
    import matplotlib

    with (
        np.errstate(all="ignore"),
        matplotlib.rc_context(fname=pictures.STYLE),
    ):
        return picture(*args)


@pytest.mark.parametrize("name", RUNS)
def test_every_kind_of_run_is_drawn_on_white(name, tmp_path):
    config = {"grad_clip": 1.0, "n_layer": 1, "n_embd": 128}
    figure = drawn(pictures.picture, read_run(write_run(tmp_path, RUNS[name], config=config)))
    assert all(ax.get_ylabel() for ax in figure.axes)
    assert figure.get_facecolor() == (1, 1, 1, 1)  # not transparent: dark pages stay legible


# ---- several runs --------------------------------------------------------------------------------


def test_a_comparison_says_what_differs_and_only_that(real, tmp_path, capsys):
    info = json.loads((real / "run.json").read_text())
    info["config"]["peak_lr"], info["data"]["fingerprint"] = 0.5, "another"
    info["run"]["began_from"] = None
    rows = [*read_rows(real, "eval"), *read_rows(real, "train")]
    other = write_run(tmp_path / "other", rows, **info)
    report.main([str(real), str(other), f"--report_dir={tmp_path}/both"])
    assert report.report_dir == ""  # given back
    printed = capsys.readouterr().out
    assert f"{tmp_path.name}/both" in printed and "trained on different data" in printed
    assert (tmp_path / "both" / "compare.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "both" / "compare.md").read_text()
    assert "trained on different data" in text
    assert "| `peak_lr` | 0.001 | 0.5 |" in text
    assert not {"`n_embd`", "began_from"} & set(text.split()) and "different devices" not in text


def three_runs(folder):
    """Two runs on one text, and one on another."""
    folder.mkdir()
    ends = [event(40, "end", ended="finished", seconds={"train": 2.0})]
    for name, loss, data in (("a", 2.0, "x"), ("b", 1.5, "x"), ("c", 1.0, "y")):
        rows = [evaluation(0, 4.2), *falling(40), evaluation(40, loss), *ends]
        about = {"data": {"fingerprint": data}, "config": {"peak_lr": 1e-3}, "ended": "finished"}
        info = about | {"start": f"2026-01-0{ord(name) - 96}T10:00:00", "end": None}
        write_run(folder / name, rows, **info)
    return folder


def test_a_folder_of_runs_is_listed_with_the_best_on_each_text_marked(tmp_path):
    out = three_runs(tmp_path / "out")
    (out / "notes.txt").write_text("no run")
    write_run(out / "killed", falling(3))
    for arguments in ([], ["out/"]):
        script = [sys.executable, REPO / "report.py", *arguments]
        done = subprocess.run(script, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        header, *lines = done.stdout.splitlines()
        assert done.returncode == 0 and done.stderr == ""
        assert header.split("  ")[0] == "run" and "best loss" in header
        rows = {line.split()[0]: line for line in lines}
        assert list(rows) == ["a", "b", "c", "killed"]
        assert [name for name, line in rows.items() if line.endswith("best")] == ["b", "c"]
        assert "40" in rows["a"] and "2.0000" in rows["a"] and "finished" in rows["a"]
        assert "2026-01-02 10:00" in rows["b"] and "no end on record" in rows["killed"]
    assert not list(out.glob("*/report.*"))


def test_a_comparison_prints_its_table_and_leaves_out_what_is_no_run(command, tmp_path):
    out = three_runs(tmp_path / "out")
    done = command(out / "a", out / "b")
    lines = [line.split("  ") for line in done.stdout.splitlines()]
    rows = {cells[0]: [cell.strip() for cell in cells[1:] if cell.strip()] for cells in lines}
    assert rows[""] == ["a", "b"]
    assert rows["best validation loss, nats"] == ["2.0000 at step 40", "1.5000 at step 40"]
    assert "epochs" not in rows, "what is equal is left out"
    for i in range(4):
        write_run(out / f"more{i}", falling(20))
    (out / "empty").mkdir()
    (out / "notes.txt").write_text("no run")
    many = command(*sorted(out.iterdir()))
    assert many.returncode == 0 and (out / "a" / "compare.png").is_file()
    assert many.stdout.splitlines()[0].startswith("run ") and "more3" in many.stdout
    empty, notes = many.stderr.splitlines()
    assert "left out" in empty and "empty" in empty and "left out" in notes and "notes" in notes


def test_what_a_terminal_obeys_does_not_reach_it(command, tmp_path):
    rows = [*falling(60, data_ms=3.0), event(60, "sample", text="\x1b]0;title\x07\x9b2J")]
    rows += [event(60, "end", ended="failed: \x1b[31m out of memory\nline")]
    folder = write_run(tmp_path / "a\x1b[2Jb\u202ec", rows)
    plain = write_run(tmp_path / "d", falling(40))
    for arguments in ([folder], [folder, plain], [tmp_path / "\u202ee"]):
        done = command(*arguments)
        assert done.stdout or done.stderr
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", done.stdout + done.stderr)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", (folder / "report.md").read_text())
