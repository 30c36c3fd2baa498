"""The report: true to metrics.jsonl, whole for every kind of run, legible, and clear where it
cannot be."""

import fcntl
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys

import helpers
import numpy as np
import pytest
from conftest import REPO, first, make_dataset, pydoc_text, read_rows, wait_for
from helpers import RUNS, evaluation, event, eventful, falling, write_run
from sources import around, bad_batches

import report
from plumbing.cli import run_script
from reporting import curves, detectors, pictures, record, results
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


# ---- report.html ---------------------------------------------------------------------------------

BROWSER = next(filter(shutil.which, ("chromium", "chromium-browser", "google-chrome")), None)
PANELS = ["loss (nats)", "gradient norm", "learning rate", "throughput (tokens/s)"]
PANELS += ["MFU (%)", "peak memory (GB)"]


def page_of(folders, refresh=0):
    """The path of the page of the runs in `folders`, freshly written into the first."""
    with np.errstate(all="ignore"):
        runs = [read_run(each) for each in folders]
        return report.write_page(runs, folders[0] / "report.html", refresh)


def two_runs(tmp_path):
    quick = [evaluation(0, 4.2), *falling(300), evaluation(150, 2.2), evaluation(300, 1.7)]
    slow = [evaluation(0, 4.2), *falling(200, lr=5e-4), evaluation(200, 1.9)]
    return [write_run(tmp_path / "quick", quick), write_run(tmp_path / "slow", slow)]


def titles(html):
    return re.findall("<figcaption>(.*?)</figcaption>", html)


# ---- what is in it -------------------------------------------------------------------------------


def test_the_command_writes_the_page_beside_the_picture(tmp_path):
    first, second = two_runs(tmp_path)
    report.main([str(first), "--html=true"])
    assert {"report.png", "report.md", "report.html"} <= {path.name for path in first.iterdir()}
    report.main([str(first), str(second), "--html=true"])
    assert (first / "compare.html").is_file() and (first / "compare.png").is_file()
    assert report.html is False, "given back"


def test_it_needs_nothing_from_elsewhere(tmp_path):
    html = page_of([write_run(tmp_path / "run", eventful())]).read_text()
    assert not re.search(r"https?:|//\w|src=|@import|url\(", html)
    assert html.count("<script>") == html.count("<style>") == 1


def test_every_panel_table_trouble_and_the_last_sample_are_there(tmp_path):
    rows = [each | {"weight_norm": 3.5} for each in falling(60, gpu_util=40, data_ms=3.0)]
    rows += [event(30, "sample", text="first"), event(60, "sample", text="<b>To be</b> & not")]
    html = page_of([write_run(tmp_path / "run", [*rows, evaluation(60, 1.7)])]).read_text()
    assert titles(html) == [*PANELS, "GPU busy (%)", "weight_norm"]
    assert "| **best validation loss, nats** | 1.7000 at step 60 |" in html
    assert "Training waits for data" in html and "device-hours" in html
    assert "~~~\n&lt;b&gt;To be&lt;/b&gt; &amp; not\n~~~" in html and "\nfirst\n" not in html
    assert "reload = 0;" in html, "it is at its end"


def test_a_curve_is_the_record(tmp_path):
    """Points of the drawing, read back through the axis, are the numbers of metrics.jsonl."""
    rows = falling(200)
    html = page_of([write_run(tmp_path / "run", rows)]).read_text()
    plot = html[html.index('<div class="plot"') :]
    right, low, high = (
        float(re.search(f'data-{name}="(.*?)"', plot)[1]) for name in ("x1", "y0", "y1")
    )
    points = re.search('class="raw thin".*?points="(.*?)"', plot)[1].split(" ")
    x, y = np.array(points, float).reshape(-1, 2).T
    np.testing.assert_allclose(x / 1000 * right, [row["step"] for row in rows], atol=2e-3)
    values = low + (1 - y / 1000) * (high - low)
    np.testing.assert_allclose(values, [row["loss"] for row in rows], atol=2e-4)


@pytest.mark.parametrize("name", RUNS)
def test_any_run_has_a_page(name, tmp_path):
    html = page_of([write_run(tmp_path / "run", RUNS[name], config={"grad_clip": 1.0})]).read_text()
    assert "loss (nats)" in titles(html) and "nan" not in re.sub("`.*?`", "", html)


# ---- while the run lives -------------------------------------------------------------------------

LIVING = """
import fcntl, json, sys, time
lock = open(sys.argv[1] + "/.lock", "a")
fcntl.lockf(lock, fcntl.LOCK_EX)
print("locked", flush=True)
for line in sys.stdin:
    with open(sys.argv[1] + "/metrics.jsonl", "a") as rows:
        rows.write(line)
    print("written", flush=True)
"""


@pytest.fixture
def living(tmp_path):
    """(folder, process): a living run, to which a line on the process's stdin adds a row."""
    folder = write_run(tmp_path / "run", falling(20))
    process = subprocess.Popen(
        [sys.executable, "-c", LIVING, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "locked\n"
    yield folder, process
    process.kill()
    process.wait()


def add(process, row):
    process.stdin.write(json.dumps(row) + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "written\n"


def test_the_page_follows_a_run_until_it_ends(living, monkeypatch):
    folder, process = living
    seen = []

    def sleep(seconds):
        html = (folder / "report.html").read_text()
        seen.append((int(re.search(r"all (\d+) steps", html)[1]), "reload = 0;" not in html))
        if len(seen) < 3:
            add(process, falling(20 + len(seen))[-1])
        else:
            process.kill()
            process.wait()

    monkeypatch.setattr(report.time, "sleep", sleep)
    report.main([str(folder), "--watch=true"])
    assert seen == [(20, True), (21, True), (22, True)]
    assert "reload = 0;" in (folder / "report.html").read_text()
    assert (folder / "report.png").exists() and (folder / "report.md").exists()


def test_asking_whether_a_run_lives_disturbs_no_run(living):
    folder, process = living
    assert is_running(read_run(folder))
    assert results.ended(read_run(folder)) == "running, at step 20"
    with open(folder / ".lock", "a") as lock, pytest.raises(BlockingIOError):
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    process.kill()
    process.wait()
    assert not is_running(read_run(folder))
    assert results.ended(read_run(folder)) == "no end on record (killed), at step 20"


# ---- in a browser --------------------------------------------------------------------------------


class Browser:
    """A headless Chromium, driven over a pipe by the Chrome DevTools Protocol."""

    def __init__(self, folder):
        to_browser, self.out = os.pipe()
        self.back, from_browser = os.pipe()

        def connect():  # the protocol's pipe is at 3 and 4
            os.dup2(to_browser, 100)
            os.dup2(from_browser, 101)
            os.dup2(100, 3)
            os.dup2(101, 4)

        flags = (
            "--headless --no-sandbox --disable-gpu --remote-debugging-pipe --no-first-run".split()
        )
        self.process = subprocess.Popen(
            [BROWSER, *flags, f"--user-data-dir={folder}"],
            preexec_fn=connect,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self.number, self.session, self.pending, self.events = 0, None, b"", []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while (answer := self.read()).get("id") != self.number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def read(self):
        while b"\0" not in self.pending:
            part = os.read(self.back, 1 << 16)
            assert part, "the browser has gone"
            self.pending += part
        message, _, self.pending = self.pending.partition(b"\0")
        return json.loads(message)

    def open(self, path, width=1200, dark=False):
        self.events = []
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=f"file://{path}")
        wait_for(lambda: self.run("document.readyState") == "complete")

    def run(self, code):
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def errors(self):
        self.run("1")  # what came before has arrived
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [each for each in self.events if each.get("method") in kinds]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if BROWSER is None:
        pytest.skip("needs a browser: chromium, or google-chrome")
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.process.kill()
    browser.process.wait()


DISPLAY = 'getComputedStyle(document.querySelector(".{}")).display'
PRESS = 'document.querySelector("button[data-key={}]").click()'


@pytest.mark.parametrize("width, dark", [(1200, False), (1200, True), (360, False), (360, True)])
def test_it_opens_on_a_desk_and_a_phone_in_light_and_dark(browser, tmp_path, width, dark):
    rows = [evaluation(0, 4.2), *falling(300), evaluation(300, 1.7), event(9, "resume")]
    path = page_of([write_run(tmp_path / "run", rows, config={"grad_clip": 1.0})])
    browser.open(path, width, dark)
    assert browser.errors() == []
    assert browser.run('document.querySelectorAll("figure").length') == len(PANELS)
    assert browser.run('document.querySelectorAll("polyline, .star").length') >= len(PANELS) + 3
    assert browser.run("document.documentElement.scrollWidth") <= width, "nothing is cut off"
    small = 'Math.min(...[...document.querySelectorAll("figure")].map(f => f.clientWidth))'
    assert (
        browser.run(small) >= 300
        and browser.run('document.querySelector("text").getBBox().height') > 10
    )
    paper = browser.run("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")


def test_the_legend_switches_curves_off_and_on_and_outlives_a_reload(browser, tmp_path):
    browser.open(page_of(two_runs(tmp_path)))
    assert browser.run('document.querySelectorAll("nav button").length') == 2
    assert browser.run(DISPLAY.format("r1")) != "none"
    browser.run(PRESS.format("r1"))
    assert browser.run(DISPLAY.format("r1")) == "none" != browser.run(DISPLAY.format("r0"))
    pressed = '[...document.querySelectorAll("button")].map(b => b.ariaPressed).join()'
    assert browser.run(pressed) == "true,false"
    browser.call("Page.reload")
    wait_for(lambda: browser.run(f"document.readyState == 'complete' && {pressed}") == "true,false")
    assert browser.run(DISPLAY.format("r1")) == "none"
    browser.run(PRESS.format("r1"))
    assert browser.run(DISPLAY.format("r1")) != "none" and browser.errors() == []


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
    "updates_fail": (
        "--optimizer=sgd --peak_lr=1e30 --grad_clip=0 --max_steps=40 --max_rollbacks=0",
        "",
    ),
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
    "throughput_falls": ("--max_steps=60", slow("train_step", 10)),
    "waits_for_data": ("--max_steps=60", slow("ShuffledWindows.__getitem__", 10)),
}
CONFIGS = sorted(path.stem for path in REPO.glob("config/*.py"))
# A config as far as a test has time for: its rates, its optimizer and its schedule, a model that is
# small.
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
    for name, value in SPEED.items():
        run.train[name] = np.full(len(run.train["step"]), value)
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
    assert names_of(on_a_quiet_machine(run_of("run", f"config/{config}.py {SHORT}"))) == []


def test_every_trouble_is_tried_on_a_run_that_has_it():
    assert set(texts()) == {*REAL, "diverges_after_resume"}


# ---- advice --------------------------------------------------------------------------------------


def rising():
    """Rows whose loss falls and then jumps back to where it began."""
    again = [row | {"step": 100 + row["step"]} for row in falling(100)[:20]]
    return falling(100) + again


def finding(tmp_path, rows, name, **info):
    with np.errstate(all="ignore"):
        found = troubles(read_run(write_run(tmp_path, rows, **info)))
    return next(each for each in found if each.name == name)


def test_the_command_for_a_step_starts_what_trained_the_run(tmp_path):
    flags = f"replay.py {tmp_path / 'run'} --step="
    info = {"command": ["train.py", "config/mine.py"]}
    look = finding(tmp_path / "run", rising(), "loss_spikes", **info).look
    assert look.startswith(f"python {flags}")
    info = {"command": ["examples/images.py"], "hardware": {"world_size": 2}}
    look = finding(tmp_path / "run", rising(), "loss_spikes", **info).look
    assert look.startswith(f"torchrun --standalone --nproc_per_node=2 {flags}")
    assert look.endswith(" --script=examples/images.py")


def test_every_trouble_has_a_detector_and_a_section_that_says_all_of_it():
    defined = {name for name, each in vars(detectors).items() if callable(each)}
    assert set(texts()) <= defined
    for about in texts().values():
        assert {"title", "Symptoms", "Causes", "Diagnosis", "Cure"} == about.keys()
        assert all("\n" not in text and "](" not in text for text in about.values())


# ---- the command that shows the step -------------------------------------------------------------


def replays_in(folder):
    """The commands for replay.py in report.md, each once, in its order."""
    commands = re.findall("`([^`]*replay.py [^`]*)`", (folder / "report.md").read_text())
    return [shlex.split(each) for each in dict.fromkeys(commands)]


def test_the_report_leads_to_skipped_updates_and_rollbacks(run_train):
    flags = ("--save_interval=4", "--max_skipped=2", "--log_interval=1", "--report=true")
    done = run_train("run", *flags, before=bad_batches([8, 9]))
    first, last = ([f"--step={n}", "--before_rollback=1"] for n in (9, 10))
    assert [command[3:] for command in replays_in(done.out_dir)] == [first, last]
    assert "Look into that step" in (done.out_dir / "report.md").read_text()
