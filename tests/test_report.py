"""The report: true to metrics.jsonl, for every kind of run, and clear where it cannot be."""

import json
import math
import re
import shutil
import subprocess
import sys
from html import unescape

import helpers
import numpy as np
import pytest
from conftest import REPO, first, make_dataset, pydoc_text, read_rows, run_python
from helpers import RUNS, evaluation, event, eventful, falling, write_run
from sources import around

import report
from plumbing.cli import run_script
from plumbing.data import FALLBACK
from plumbing.files import lock_file
from reporting import panels, results
from reporting.record import is_running, read_run
from reporting.troubles import texts, troubles

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
    return train_in(folder, "run", *flags.split()).out_dir


@pytest.fixture
def command(capsys, monkeypatch):
    """command(*arguments) -> report.py with these arguments, in this process."""
    monkeypatch.setattr(sys, "argv", ["report.py"])

    def run(*arguments):
        capsys.readouterr()
        code = run_script(lambda: report.main([str(each) for each in arguments]))
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return run


def words_of(folder):
    with np.errstate(all="ignore"):
        return report.text_of([read_run(folder)])


def outcome_of(folder):
    with np.errstate(all="ignore"):
        return results.outcome(read_run(folder))


def drawing_of(page):
    """The panels of a page, {title: {..., "curves": ...}}, as its script reads them."""
    (data,) = re.findall('<script type="application/json" id="data">(.*)</script>', page)
    return {each["title"]: each for each in json.loads(data)["panels"]}


# ---- a run ---------------------------------------------------------------------------------------


def test_the_command_writes_a_picture_and_words(real):
    done = run_python("report.py", real)
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
    for name in rows[0].keys() - {"kind"}:
        recorded = [math.nan if row[name] is None else row[name] for row in rows]
        np.testing.assert_array_equal(run.train[name], np.array(recorded, float))
    outcome = outcome_of(real)
    seconds = sum(row["step_ms"] for row in rows) / 1000
    throughput = float(outcome["throughput, tokens/s"].replace(",", ""))
    assert throughput == pytest.approx(rows[-1]["tokens"] / seconds, rel=1e-3)
    assert outcome["tokens trained on"] == f"{rows[-1]['tokens']:,}"
    assert "GPU utilization, %" not in outcome, "what is unknown is left out"
    run.train["mfu"] = np.array([0.1, 0.3])  # of steps with as many tokens: a mean over time
    assert results.outcome(run)["MFU"] == "15.0%"
    run.train["mfu"][1] = math.nan  # as where a step has shown that the peak was false
    assert "MFU" not in results.outcome(run)
    achieved = throughput * run.facts["flops_per_token"] / 1e12
    assert float(outcome["TFLOP/s achieved"]) == pytest.approx(achieved, rel=1e-2)
    spent = sum(read_rows(real, "event")[-1]["seconds"].values())
    assert results.time_spent(run) == (spent, "")


def test_a_run_on_another_text_than_asked_for_says_so_first(tmp_path):
    ((asked, other),) = FALLBACK.items()
    for learned, is_told in ((other, True), (asked, False), ("of a fork", False)):
        info = {"config": {"dataset": asked}, "data": {"name": learned}}
        text = words_of(write_run(tmp_path / "run", falling(20), **info))
        assert (f"{other!r} INSTEAD OF {asked!r}" in text[: text.index("## Result")]) == is_told
    folder = write_run(tmp_path / "run", falling(40), run={"deterministic": False})
    assert "`deterministic` was off" in words_of(folder)


def test_device_hours_are_those_of_all_processes_or_at_least_of_all_steps(tmp_path, monkeypatch):
    end = event(30, "end", ended="finished", seconds={"start": 800.0, "train": 1000.0})
    folder = write_run(tmp_path / "run", [*falling(30), end], hardware={"world_size": 4})
    assert outcome_of(folder)["device-hours"] == "2.000"
    rows = falling(30, step_ms=120_000.0)
    write_run(folder, [*rows, event(30, "resume"), end], hardware={"world_size": 4})
    assert outcome_of(folder)["device-hours"] == "at least 4.000"
    assert not [what for what in outcome_of(folder) if "cost" in what]
    monkeypatch.setenv("DOLLARS_PER_HOUR", "two")
    assert not [what for what in outcome_of(folder) if "cost" in what]
    monkeypatch.setenv("DOLLARS_PER_HOUR", "2.5")
    assert outcome_of(folder)["cost at $2.5 an hour"] == "at least $10.00"


def test_a_report_needs_no_torch(tmp_path):
    folder = write_run(tmp_path / "run", falling(40))
    code = "import sys, report; report.main(); sys.exit('torch' in sys.modules)"
    assert run_python("-c", code, folder).returncode == 0


# ---- stops and resumes ---------------------------------------------------------------------------


def test_a_run_that_was_stopped_and_resumed_has_the_report_of_one_that_was_not(tmp_path):
    """The two steps that a stopped run takes after its save count nowhere, also if it is never
    resumed; nor does what a kill left."""
    rows = [evaluation(0, 4.2), *falling(80), evaluation(80, 1.7)]
    end = event(80, "end", ended="finished", seconds={"train": 0.4})
    whole = read_run(write_run(tmp_path / "whole", [*rows, end]))
    stop = event(40, "end", ended="stopped by SIGTERM", seconds={"train": 0.2})
    first = [row for row in rows if row["step"] <= 40]
    witness = [helpers.row(41, 9.0), helpers.row(42, 9.0), event(42, "skipped")]
    stopped = read_run(write_run(tmp_path / "stopped", [*first, *witness, stop]))
    assert stopped.train["step"][-1] == 40 and stopped.train["loss"].max() < 9
    assert results.ended(stopped) == "stopped by SIGTERM, at step 40"
    assert results.outcome(stopped)["updates skipped"] == "0"
    after = [event(40, "resume"), *rows[len(first) :]]
    killed = [event(50, "skipped"), event(45, "out_of_memory"), event(40, "resume")]
    log = [*first, *witness, stop, after[0], *killed, *after[1:], end]
    resumed = read_run(write_run(tmp_path / "resumed", log))
    np.testing.assert_equal(resumed.train, whole.train)
    np.testing.assert_equal(resumed.evals, whole.evals)
    then, now = (results.outcome(run) for run in (whole, resumed))
    differing = {what for what in then if then[what] != now[what]}
    assert differing == {"resumes", "device-hours", "wall time, start included"}
    names = [row["event"] for row in resumed.events]
    assert names == ["end", "resume", "resume", "end"]


def test_of_a_log_of_before_that_rolled_back_the_newest_course_is_read(tmp_path):
    rollback = event(20, "rollback", why="not finite", at_step=25)
    bad = [evaluation(24, 9.0), event(24, "skipped"), event(25, "skipped"), rollback]
    log = [*falling(20), *bad, *falling(22)[20:], event(22, "resume"), *falling(40)[22:]]
    run = read_run(write_run(tmp_path, log))
    assert [row["event"] for row in run.events] == ["rollback", "resume"]
    assert run.train["step"][-1] == 40 and not len(run.evals["step"])


EQUAL = {"compared": 240, "equal": 240, "steps": 231, "first_difference": None}
OTHER = {"step": 507, "field": "loss", "then": 1.25, "now": 1.5}


@pytest.mark.parametrize(
    "check, words",
    [
        (EQUAL, "231 steps computed again, every loss and norm the same"),
        (EQUAL | {"equal": 6, "first_difference": OTHER}, "other numbers from step 507 on: loss"),
    ],
)
def test_a_resume_is_said_to_be_what_was_measured(tmp_path, check, words):
    resume = event(40, "resume", knobs={"seed": 1}, changed={"peak_lr": [0.1, 0.2]})
    checked = event(50, "resume_checked", **check, **{"from": 40})
    folder = write_run(tmp_path, [*falling(40), resume, checked, *falling(60)[40:]])
    text = words_of(folder)
    (line,) = re.findall(r"^\| 40 .* resume .*", text, re.MULTILINE)
    assert "changed since: peak_lr 0.1 -> 0.2" in line and "seed" not in line
    assert "only if a check that follows says so" in line
    (line,) = re.findall(r"^\| 50 .* resume checked .*", text, re.MULTILINE)
    assert words in line and (check == EQUAL or "changed since: peak_lr 0.1 -> 0.2" in line)


def test_every_event_is_in_the_report(tmp_path):
    folder = write_run(tmp_path, eventful())
    drawn = {curve.key: curve.x.tolist() for curve in panels.events_of(read_run(folder))}
    assert drawn == {
        "resume": [31, 40],
        "skipped": [20, 21, 25],
        "audit": [45],
        "out of memory": [30],
    }
    text = re.sub(" +", " ", words_of(folder))
    for words in (
        "| 20 | skipped |",
        "micro_batch 4",
        "stopped by SIGINT",
        "why a loss spike; at_step 52",
        "| 45 | audit | odd first; bits 3",
        "failed: no more. And so on",
        "\n To be\n ~~~ or not\n",
    ):
        assert words in text, words
    assert outcome_of(folder)["updates skipped"] == "3"
    assert results.time_spent(read_run(folder)) == (6.0, "at least ")
    rows = [event(0, "resume"), *falling(9), event(9, "end", seconds={"train": 1.0})]
    fork = write_run(tmp_path, rows, run={"began_from": "best.pt"})
    assert outcome_of(fork)["resumes"] == "0"


# ---- records that are not whole ------------------------------------------------------------------


def test_damaged_lines_are_left_out_and_counted(tmp_path):
    log = write_run(tmp_path, falling(20)) / "metrics.jsonl"
    bad = b'\0\0\0\n{"kind": "train", "step": "x"}\n\xff\n'
    log.write_bytes(bad + log.read_bytes() + b'{"kind": "train", "step": 21, "lo')  # half written
    assert read_run(tmp_path).train["step"].tolist() == [*range(1, 21)]
    assert "3 damaged line(s)" in words_of(tmp_path)


def test_what_is_no_record_is_refused_in_one_line(tmp_path, command):
    cases = {"": "is empty", '{"loss": 1.5, "iter": 3}\n' * 9: "9 other lines"}
    for content, word in cases.items():
        (tmp_path / "metrics.jsonl").write_text(content)
        done = command(tmp_path)
        assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
        assert word in done.stderr and str(tmp_path) in done.stderr
    assert "no metrics.jsonl" in command(tmp_path / "none").stderr
    assert not list(tmp_path.glob("report.*"))


# ---- several runs --------------------------------------------------------------------------------


def three_runs(folder):
    """Two runs on one text, and one on another."""
    folder.mkdir()
    ends = [event(40, "end", ended="finished", seconds={"train": 2.0})]
    for name, loss, data in (("a", 2.0, "x"), ("b", 1.5, "x"), ("c", 1.0, "y")):
        rows = [evaluation(0, 4.2), *falling(40), evaluation(40, loss), *ends]
        config = {"peak_lr": 1e-3 * loss, "n_embd": 32}
        write_run(folder / name, rows, data={"fingerprint": data}, config=config, start=name)
    return folder


def test_a_comparison_says_what_differs_and_only_that(command, tmp_path):
    out = three_runs(tmp_path / "out")
    done = command(out / "a", out / "c", f"--report_dir={tmp_path}/both")
    assert report.report_dir == "", "given back"
    assert (tmp_path / "both" / "compare.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "both" / "compare.md").read_text()
    assert not re.search(r"^\| (start|end|command|wandb_id) ", text, re.MULTILINE)
    rows = [re.split(r" *\| *", line)[1:-1] for line in text.splitlines() if line[:1] == "|"]
    assert ["peak_lr", "0.002", "0.001"] in rows
    assert ["best validation loss", "2.0000 at step 40", "1.0000 at step 40"] in rows
    assert not {"n_embd", "epochs"} & {row[0] for row in rows}, "what is equal is left out"
    _, _, best, other, folder, *words = done.stdout.splitlines()
    assert best.startswith("| a ") and other.startswith("| c ") and folder == f"best: {out}/a"
    assert words[:2] == ["a: peak_lr=0.002", "c: peak_lr=0.001"]
    assert "other data" in other and "other data" not in best and "other data" in text
    assert "other data" not in command(out / "a", out / "b").stdout


def test_a_folder_of_runs_is_listed(command, tmp_path):
    out = three_runs(tmp_path / "out")
    (out / "notes.txt").write_text("no run")
    write_run(out / "killed", falling(3))
    listed = command(out)
    assert listed.stderr == ""
    rows = [re.split(r" *\| *", line)[1:-1] for line in listed.stdout.splitlines()[2:6]]
    assert [row[0] for row in rows] == ["b", "a", "c", "killed"], "the lowest loss first"
    assert rows[0] == ["b", "1.5000", "finished, at step 40", "100,000", str(out / "b")]
    assert "other data" in rows[2][2] and "no end on record (killed), at step 3" in rows[3][2]
    assert not list(out.glob("*/report.*"))
    many = command(*sorted(out.iterdir()))
    assert many.returncode == 0 and (out / "a" / "compare.png").is_file()
    left_out, header, *_ = many.stdout.splitlines()
    assert "left out" in left_out and "notes" in left_out and header.startswith("| run ")


FLAGS = "run,n_layer=2,n_head=2,batch_size=8,warmup_steps=5"  # of all runs of a sweep


def swept(
    folder, rate, seed, loss, steps=40, ended="finished", resume=(), more="", warmup=0, **info
):
    """The folder of a run of a sweep."""
    rows = [*falling(steps), evaluation(steps, loss), *resume, event(steps, "end", ended=ended)]
    config = {"peak_lr": rate, "seed": seed, "max_steps": steps, "decay_steps": steps}
    config["warmup_steps"] = warmup or steps // 10  # typed, or as max_steps resolves it
    run = {"written": {"warmup_steps": 100}, "code": {"model.py": "a"}} | info
    folder = folder / f"{FLAGS},peak_lr={rate},seed={seed}{more}"
    return write_run(folder, rows, config=config, run=run)


def test_runs_are_called_by_what_differs_and_seeds_are_one_row(tmp_path, command, monkeypatch):
    for i, rate in enumerate((1e-3, 3e-3, 1e-2)):
        for seed in (1, 2, 3):
            swept(tmp_path, rate, seed, 3 - i + 0.1 * seed)
    swept(tmp_path, 3e-3, 4, 0.5, ended="stopped by SIGTERM")
    changed = event(40, "resume", changed={"peak_lr": [0.1, 0.003]})
    swept(tmp_path, 3e-3, 5, 0.6, resume=[changed])
    swept(tmp_path, 3e-3, 1, 2.4, more=",again")
    swept(tmp_path, 1e-2, 3, 0.9, steps=80, more=",longer")
    swept(tmp_path, 1e-3, 2, 3.2, code={"model.py": "b"})
    table = command(tmp_path).stdout.splitlines()
    rows = {row[1]: row[2:] for row in (re.split(r" *\| *", line) for line in table[2:-2])}
    assert {name: row[0] for name, row in rows.items()} == {
        "peak_lr=0.003 max_steps=40 seed=4": "0.5000",
        "peak_lr=0.003 max_steps=40 seed=5": "0.6000",
        "peak_lr=0.01 max_steps=80 seed=3": "0.9000",
        "peak_lr=0.01 max_steps=40": "1.2000 ± 0.1000 (n=3)",
        "peak_lr=0.003 max_steps=40": "2.2000 ± 0.1000 (n=3)",
        "peak_lr=0.003 max_steps=40 seed=1": "2.4000",
        "peak_lr=0.001 max_steps=40": "3.2000 ± 0.1000 (n=3)",
    }
    assert [each[0][:6] for each in rows.values() if "code differs" in each[1]] == ["3.2000"]
    assert table[-1].startswith("peak_lr=0.01 is the best, and the highest of 3 tried")
    monkeypatch.setattr(results, "line_width", lambda: 80)
    lines = command(tmp_path).stdout.splitlines()
    assert max(map(len, lines[:9])) <= 80 and lines[2].startswith("| peak_lr=0.003 max_steps=40 s")
    typed = [swept(tmp_path, 1e-3, 1, 2.0, more=f",{i}", warmup=i) for i in (4, 5)]
    assert [run.name for run in report.read_runs(typed)] == ["warmup_steps=100", "warmup_steps=5"]


# ---- the picture and the page --------------------------------------------------------------------

PANELS = ["loss (nats)", "gradient norm", "learning rate", "throughput (tokens/s)"]
PANELS += ["memory (GB)"]
EVALUATED = ["bits per byte", "accuracy (%)"]


def page_of(*folders, refresh=0):
    """The path of the page of the runs in `folders`, freshly written into the first."""
    with np.errstate(all="ignore"):
        path = folders[0] / "report.html"
        runs = report.read_runs(folders)
        path.write_text(panels.page(runs, report.text_of(runs), refresh), errors="replace")
        return path


def two_runs(tmp_path):
    quick = [evaluation(0, 4.2), *falling(300), evaluation(150, 2.2), evaluation(300, 1.7)]
    slow = [evaluation(0, 4.2), *falling(200, lr=5e-4), evaluation(200, 1.9)]
    return [write_run(tmp_path / "quick", quick), write_run(tmp_path / "slow", slow)]


@pytest.mark.parametrize("name", RUNS)
def test_every_kind_of_run_is_drawn_twice_from_the_same_panels(name, tmp_path):
    folder = write_run(tmp_path / "run", RUNS[name])
    with np.errstate(all="ignore"):
        figure = panels.picture([read_run(folder)])
    assert figure.get_facecolor()[3] == 1, "not transparent: dark pages stay legible"
    drawn = drawing_of(page_of(folder).read_text())
    assert list(drawn) == [ax.get_ylabel() for ax in figure.axes]
    assert "loss (nats)" in drawn
    for ax, panel in zip(figure.axes, drawn.values(), strict=True):
        assert ax.get_ylim() == pytest.approx((panel["low"], panel["high"]))


def test_a_curve_is_the_record(tmp_path):
    """Its points, in the picture and in the page, are the numbers of metrics.jsonl."""
    rows = falling(200, weight_norm=3.5)
    folder = write_run(tmp_path / "run", rows, config={"grad_clip": 0.7})
    drawn = drawing_of(page_of(folder).read_text())
    assert set(drawn["gradient norm"]["curves"][-1]["y"]) == {0.7}
    loss = drawn["loss (nats)"]["curves"][0]
    ax = panels.picture([read_run(folder)]).axes[0]
    for x, y in ((loss["x"], loss["y"]), ax.lines[0].get_data()):
        assert list(x) == [row["step"] for row in rows]
        assert list(y) == [row["loss"] for row in rows]


def test_a_comparison_is_the_same_panels_with_the_curves_of_all(tmp_path):
    folders = two_runs(tmp_path)
    drawn = drawing_of(page_of(*folders).read_text())
    assert list(drawn) == PANELS + EVALUATED
    for panel in drawn.values():
        assert {curve["key"].split(":")[0] for curve in panel["curves"]} == {"quick", "slow"}
    axes = {"step": 300, "tokens": 512 * 300, "time": 300 * 5 / 60_000}
    for axis, end in axes.items():
        ax = panels.picture(report.read_runs(folders), axis).axes[0]
        assert max(line.get_xdata()[-1] for line in ax.lines) == pytest.approx(end)
        assert ax.get_subplotspec().colspan == range(panels.COLUMNS)


def test_the_range_of_losses_is_what_any_run_has_after_a_tenth_of_its_steps(tmp_path):
    """A short run that ends high is seen whole, beside a long one."""
    high = [each | {"loss": each["loss"] + 2} for each in falling(40)]
    folders = [write_run(tmp_path / "long", falling(2000)), write_run(tmp_path / "short", high)]
    loss = panels.panels_of(report.read_runs(folders))[0]
    means = np.concatenate([curve.y[curve.x >= curve.x[-1] / 10] for curve in loss.curves])
    assert 0.8 * min(means) < loss.limits()["low"] < min(means)
    assert max(means) < loss.limits()["high"] < 1.1 * max(means)


def test_no_two_of_many_runs_look_alike(tmp_path):
    runs = report.read_runs([write_run(tmp_path / str(i), falling(60)) for i in range(20)])
    lines = panels.picture(runs).axes[0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 20


def test_seeds_share_a_colour_and_a_whole_legend_names_each_setting(tmp_path):
    rates = (0.001, 0.003, 0.01, 0.03)
    folders = [swept(tmp_path, rate, seed, 1.5 + 10 * rate) for rate in rates for seed in (1, 2)]
    runs = report.read_runs(folders)
    figure = panels.picture(runs, panels.axis_of(runs))
    assert figure.axes[0].get_xlabel() == "step"
    figure.canvas.draw()
    (legend,) = figure.legends
    assert 0 <= legend.get_window_extent().x0 and legend.get_window_extent().x1 <= figure.bbox.x1
    words = [text.get_text() for text in legend.texts]
    assert words == [f"peak_lr={r}: {1.5 + 10 * r:.4f} ± 0.0000 (n=2)" for r in rates]
    colours = [line.get_color() for line in figure.axes[0].lines]
    assert colours == [colour for colour in list(panels.COLOURS.values())[:4] for _ in range(4)]
    runs[0].setting += " batch_size=16"  # a step is not the same any more
    assert panels.axis_of(runs) == "tokens"


def test_runs_of_the_same_bits_have_the_same_curve_whatever_their_length(tmp_path):
    long = falling(400)
    runs = [write_run(tmp_path / name, rows) for name, rows in (("a", long[:200]), ("b", long))]
    one, other = panels.panels_of(report.read_runs(runs))[0].curves
    assert one.y[:190].tolist() == other.y[:190].tolist()


def test_numbers_of_thousands_are_short(tmp_path):
    folder = write_run(tmp_path / "run", falling(20_000, lr=2e-5))
    axes = panels.picture([read_run(folder)]).axes
    labels = [t.get_text() for ax in axes for t in ax.get_xticklabels() + ax.get_yticklabels()]
    assert {"10k", "100k", "2e−05"} <= set(labels)


def test_the_page_holds_the_text_and_needs_nothing_from_elsewhere(tmp_path):
    rows = [each | {"weight_norm": 3.5} for each in falling(60, gpu_util=40, data_ms=3.0)]
    rows += [event(30, "sample", text="first"), event(60, "sample", text="<b>To be</b> & not")]
    rows += [evaluation(60, 1.7), event(60, "end", ended="</script> in it")]
    folder = write_run(tmp_path / "run", rows)
    html = page_of(folder).read_text()
    assert list(drawing_of(html)) == [*PANELS, "GPU busy (%)", *EVALUATED, "weight_norm"]
    assert "1.7000 at step 60" in html and "Training waits for data" in html
    assert "    &lt;b&gt;To be&lt;/b&gt; &amp; not\n" in html and "    first\n" not in html
    assert not re.search(r"https?:|//\w|src=|@import|url\(", html)
    assert html.count("<script") == 2 == html.count("</script>")


def test_the_page_follows_a_run_until_it_ends(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", falling(20))
    seen = []

    def sleep(seconds):
        html = (folder / "report.html").read_text()
        steps = drawing_of(html)["loss (nats)"]["curves"][0]["x"][-1]
        seen.append((steps, f'"refresh": {seconds}' in html))
        write_run(folder, falling(20 + len(seen)))

    monkeypatch.setattr(report.time, "sleep", sleep)
    monkeypatch.setattr(report, "is_running", lambda run: len(seen) < 3)
    report.main([str(folder), "--watch=true"])
    assert seen == [(20, True), (21, True), (22, True)]
    assert '"refresh": 0' in (folder / "report.html").read_text()
    assert (folder / "report.png").exists() and (folder / "report.md").exists()


LIVING = """
import sys, time
from plumbing.files import lock_file
lock = lock_file(sys.argv[1] + "/.lock")
print("locked", flush=True)
time.sleep(60)
"""


def test_asking_whether_a_run_lives_disturbs_no_run(tmp_path):
    folder = write_run(tmp_path / "run", falling(20), config={"max_steps": 1020})
    command = [sys.executable, "-c", LIVING, folder]
    how = {"stdout": subprocess.PIPE, "text": True, "cwd": REPO}
    with subprocess.Popen(command, **how) as process:
        assert process.stdout.readline() == "locked\n"
        assert is_running(read_run(folder))
        assert results.ended(read_run(folder)) == "running, at step 20 of 1,020, 0:00:05 left"
        with pytest.raises(BlockingIOError):
            lock_file(folder / ".lock")
        process.kill()
    assert not is_running(read_run(folder))
    assert results.ended(read_run(folder)) == "no end on record (killed), at step 20"
    write_run(folder, [*falling(20), event(20, "end", ended="finished")])
    assert results.ended(read_run(folder)) == "finished, at step 20"


# ---- in a browser --------------------------------------------------------------------------------

BROWSER = next(filter(shutil.which, ("chromium", "chromium-browser", "google-chrome")), None)
SPY = "<script>const failed = []; onerror = message => failed.push(message)</script>"
PROBE = """<pre id="result"></pre><script>
const plot = document.querySelector(".plot"), box = plot.getBoundingClientRect();
plot.onpointermove({clientX: box.left + box.width * 149.2 / 303});
const all = selector => [...document.querySelectorAll(selector)];
const seen = {
  figures: all("figure").map(each => each.clientWidth), curves: all("polyline").length,
  wide: document.documentElement.scrollWidth, paper: getComputedStyle(document.body).backgroundColor,
  tip: get(".tip").textContent, crosses: all(".cross").map(each => getComputedStyle(each).x),
  bullet: getComputedStyle(get(".tip span"), "::before").color,
  byTime: (get("#axis").value = "time", get("#log").click(), get("svg text:last-of-type").textContent),
};
get("#result").textContent = JSON.stringify([failed, seen]);
</script></body>"""


def opened(path, width=1400, dark=False, place="149.2"):
    """[errors, what PROBE sees] of a page in a browser; place: of the cursor, of 303 steps."""
    html = path.read_text().replace("<head>", "<head>" + SPY)
    path.write_text(html.replace("</body>", PROBE.replace("149.2", place)))
    flags = "--headless --no-sandbox --disable-gpu --disable-background-networking --dump-dom"
    command = [BROWSER, *flags.split(), f"--user-data-dir={path.parent / 'browser'}"]
    command += [f"--window-size={width},900", f"--blink-settings=preferredColorScheme={1 - dark}"]
    done = subprocess.run([*command, f"file://{path}"], capture_output=True, text=True, timeout=60)
    return json.loads(unescape(re.search('id="result">(.*)</pre>', done.stdout)[1]))


needs_browser = pytest.mark.skipif(not BROWSER, reason="needs chromium, or google-chrome")


@needs_browser
@pytest.mark.parametrize("width, dark", [(1400, False), (500, True)])
def test_it_opens_on_a_desk_and_a_phone_in_light_and_dark(tmp_path, width, dark):
    rows = [event(0, "resume"), evaluation(0, 4.2), *falling(300), evaluation(300, 1.7)]
    errors, seen = opened(page_of(write_run(tmp_path / "run", rows)), width, dark)
    assert errors == []
    assert len(seen["figures"]) == len(PANELS + EVALUATED) and min(seen["figures"]) >= 300
    assert seen["curves"] == len(PANELS + EVALUATED) + 7 and seen["wide"] <= width
    assert len(seen["crosses"]) == len(seen["figures"]) and len(set(seen["crosses"])) == 1
    assert seen["bullet"] == ("rgb(0, 114, 178)" if dark else "rgb(86, 180, 233)")
    assert seen["byTime"] == "training time (minutes)"
    assert seen["paper"] == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")
    loss = rows[150]["loss"]  # of step 149
    assert seen["tip"].startswith(f"step  149\ntraining, each step  {loss:.4g}")


@needs_browser
def test_a_hover_box_names_its_numbers_which_are_of_one_step(tmp_path):
    tip = opened(page_of(*two_runs(tmp_path)), place="148.1")[1]["tip"]
    head, quick, slow = tip.splitlines()
    assert head == "step  150  training, mean of 5 steps  validation"
    assert re.fullmatch(r"quick  [\d.]+  2\.2", quick) and re.fullmatch(r"slow  [\d.]+", slow)


# ---- detectors of troubles -----------------------------------------------------------------------

SPEED = {"step_ms": 5.0, "data_ms": 0.1, "tokens_per_sec": 1e5}  # of a machine that is not busy
CONSTANT = "--schedule=constant --warmup_steps=5 --grad_clip=0 --batch_size=64 --max_steps=140"


def slow(what, milliseconds):
    """Source for run_train's `before`: from step 30 on `what` of train.py takes longer."""
    wait = f"taken.append(1)\ntime.sleep({milliseconds / 1000} * (len(taken) > 30))"
    return "taken = []\n" + around(what, wait)


HOOK = "result.head.register_forward_pre_hook(lambda head, x: (x[0] - 1e4).relu())"
DEAD = around("build_model", then=HOOK)
KEEPS = "kept = []\n" + around("train_step", "kept.append(torch.ones(2_000_000))")
FULL = around("forward_backward", 'if run.state["micro_batch"] > 2:\n    raise MemoryError')
REAL = {  # troubles: flags of the run, source that runs before it
    "updates_fail": ("--optimizer=sgd --peak_lr=1e30 --grad_clip=0 --max_steps=40", ""),
    "clipped_always": ("--grad_clip=0.01 --max_steps=60", ""),
    "norm_is_zero": ("--max_steps=40", DEAD),
    "loss_stuck": ("--peak_lr=1e-6 --min_lr=0 --max_steps=80", ""),
    "underfitting": ("--peak_lr=3e-4 --min_lr=0 --max_steps=120", ""),
    "loss_rises": (f"{CONSTANT} --optimizer=momentum --momentum=0.99 --peak_lr=1", ""),
    "loss_spikes": (f"{CONSTANT} --optimizer=sgd --peak_lr=0.5 --seed=4", ""),
    "plateau": (
        "--schedule=step --step_size=60 --gamma=1e-6 --min_lr=0 --peak_lr=1e-2 --max_steps=240",
        "",
    ),
    "overfitting": (
        "--dataset=small --n_embd=64 --peak_lr=1e-2 --max_steps=240 --eval_interval=30",
        "",
    ),
    "out_of_memory": ("--max_steps=20", FULL),
    "memory_grows": ("--max_steps=60", KEEPS),
    "throughput_falls": ("--max_steps=60", slow("train_step", 50)),
    "waits_for_data": ("--max_steps=60", slow("ShuffledWindows.__getitem__", 10)),
}
CONFIGS = sorted(path.stem for path in REPO.glob("config/*.py"))
# As far as a test has time for: its rates, optimizer and schedule, of a small model
SHORT = "--dataset=manual --n_layer=1 --n_embd=64 --n_head=2 --block_size=32 --batch_size=16 --max_steps=80"
SHORT += " --accum_steps=1 --num_workers=0 --eval_interval=40 --audit_interval=0 --compile=false"


def names_of(run):
    with np.errstate(all="ignore"):
        return [found.name for found in troubles(run)]


@pytest.fixture(scope="session")
def manual(data_dir):
    """The dataset `manual`: 200,000 characters of Python's own documentation."""
    make_dataset(data_dir, "manual", pydoc_text()[:200_000])


@pytest.fixture
def run_of(manual, run_train, tmp_path):
    """run_of(name, flags, before) -> the folder of a real run."""

    def run(name, flags, before=""):
        common = "--dataset=manual --log_interval=5 --eval_tokens=2000 --eval_interval=60"
        folder = f"--out_dir={tmp_path / name}"  # last, as a config file has one of its own
        done = run_train(name, *common.split(), *flags.split(), folder, before=before, code=None)
        return done.out_dir

    return run


def on_a_quiet_machine(folder):
    """The Run in `folder`, as if the machine had done nothing else meanwhile."""
    run = read_run(folder)
    run.train |= {name: np.full(len(run.train["step"]), value) for name, value in SPEED.items()}
    return run


@pytest.mark.parametrize("name", REAL)
def test_a_real_run_that_has_the_trouble_is_told_so(name, run_of):
    flags, before = REAL[name]
    assert name in names_of(read_run(run_of("run", flags, before)))


def test_a_run_that_diverges_after_its_resume_is_told_so_with_the_jump_of_the_rate(run_of):
    flags = "--schedule=constant --peak_lr=1e-2 --warmup_steps=5 --max_steps="
    good = on_a_quiet_machine(run_of("run", flags + "60"))
    assert names_of(good) == []
    calm = on_a_quiet_machine(run_of("run", flags + "90"))
    assert [row["event"] for row in calm.events].count("resume") == 1
    assert "diverges_after_resume" not in names_of(calm)
    jumped = read_run(run_of("run", flags.replace("1e-2", "3") + "150"))
    (found,) = [each for each in troubles(jumped) if each.name == "diverges_after_resume"]
    assert "resumed at step 90" in found.shows and "from 0.01 to 3" in found.shows


@pytest.mark.parametrize("config", first(2, CONFIGS))
def test_a_config_shortened_is_told_of_no_trouble(config, run_of):
    assert names_of(on_a_quiet_machine(run_of("run", f"{REPO}/config/{config}.py {SHORT}"))) == []


def test_every_trouble_has_a_detector_and_a_section_that_says_all_of_it():
    assert set(texts()) == {*REAL, "diverges_after_resume"}, "each is tried on a run that has it"
    page = (REPO / "docs" / "trouble.md").read_text()
    for name, (title, cure) in texts().items():
        section = page[page.index(f"## {title} ({name})") :].partition("\n## ")[0]
        for part in ("Symptoms", "Causes", "Diagnosis", "Cure"):
            assert f"**{part}**: " in section, name
        assert cure and "\n" not in cure and "](" not in cure


def test_a_report_at_step_0_warns_of_nothing(tmp_path):
    folder = write_run(tmp_path / "run", [evaluation(0, 4.2)])
    done = run_python("-W", "error", "report.py", folder)
    assert (done.returncode, done.stderr) == (0, "")
