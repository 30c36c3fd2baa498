"""report.html: one file with every curve, right to the digit, that lives in a real browser."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import wait_for
from helpers import RUNS, evaluation, event, eventful, falling, write_run

import report
from reporting import results
from reporting.record import is_running, read_run

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
