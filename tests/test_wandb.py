"""wandb gets every row at most once, under one id, across kills; whatever it does, training goes
on."""

import json
import re
import struct
import sys
import types
from contextlib import nullcontext
from importlib.util import find_spec

import pytest
from conftest import REPO, read_rows
from helpers import evaluation, event, falling, write_run
from sources import stop_at

ON = ("--wandb_log=true", "--max_steps=30", "--eval_interval=10", "--save_interval=10")
ON += ("--log_interval=1",)
FAKE = """
import json, pathlib
class Settings:
    mode = "offline"
    sync_dir = "somewhere"
    def __init__(self, *_, **__): self.settings = self
setup = Settings
class Run:
    url, settings, starting_step = "", Settings(), 0
    def __init__(self, dir, id):
        folder = pathlib.Path(dir, "wandb")
        number = len(list(folder.glob("*"))) if folder.exists() else 0
        self.path = folder / f"offline-run-{number}-{id}" / "rows.jsonl"
        self.path.parent.mkdir(parents=True)
    def define_metric(self, *_, **__): pass
    def log(self, row, step):
        with self.path.open("a") as file: print(json.dumps([step, row]), file=file)
    def finish(self, exit_code): pass
def init(dir, id, **_): return Run(dir, id)
"""
BROKEN = {
    "is missing": ("raise ImportError('No module named wandb')", "No module named wandb"),
    "breaks in mid-run": (FAKE + "def log(*_, **__): 1 / 0\nRun.log = log", "division by zero"),
    "breaks at the end": (FAKE + "def f(*_, **__): 1 / 0\nRun.finish = f", "division by zero"),
}


@pytest.fixture
def wandb(tmp_path):
    """wandb(source) -> source that makes it the module `wandb` of a run."""

    def use(source):
        (tmp_path / "wandb.py").write_text(source)
        return f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"

    return use


def sent(done):
    """({step: the numbers sent for it, in one}, the events, the id) of the newest session below
    out_dir."""
    (path,) = done.out_dir.glob("wandb/offline-run-*")
    steps, events = {}, []
    for line in (path / "rows.jsonl").read_text().splitlines():
        step, row = json.loads(line)
        assert step >= max(steps, default=0)  # or wandb would drop it
        if "step" not in row:
            ((name, text),) = row.items()
            events.append(json.loads(text))
            assert name == f"events/{events[-1]['event']}"
        else:
            steps.setdefault(step, {}).update(row)
    return steps, events, path.name.split("-")[3]


def logged(done):
    """{sequences: the train and the eval row of metrics.jsonl in one, as wandb names them}"""
    steps = {}
    for row in done.rows("train") + done.rows("eval"):
        kind = {"train": "train", "eval": "val"}[row.pop("kind")]
        step = row.pop("step")
        named = {f"{kind}/{name.removeprefix('val_')}": row[name] for name in row}
        steps.setdefault(8 * step, {"step": step}).update(named)
    return steps


def test_every_row_arrives_and_no_bit_of_the_run_changes(run_train, wandb):
    done = run_train("run", *ON, before=wandb(FAKE))
    assert done.stderr == "", done.stderr
    assert sent(done) == (logged(done), done.rows("event"), done.facts["wandb_id"])
    without = run_train("without", *ON, "--wandb_log=false", before=wandb(FAKE))
    assert "wandb" not in without.stdout and not list(without.out_dir.glob("wandb*"))
    assert without.fingerprint(30) == done.fingerprint(30)


def test_after_kills_every_row_arrives_once_and_the_run_stays_one(run_train, wandb):
    """The second kill comes before the first one's last row, which metrics.jsonl then lacks."""
    for step in (19, 14):
        run_train("run", *ON, before=wandb(FAKE) + stop_at(step, "SIGKILL"), code=137)
    stopped = run_train("run", *ON, before=wandb(FAKE) + stop_at(22, "SIGINT"), code=130)
    assert stopped.stderr == ""  # Ctrl-C stays ours
    assert list(sent(stopped)[0]) == [8 * step for step in range(23)]
    done = run_train("run", *ON, before=wandb(FAKE))
    assert sent(done) == (logged(done), done.rows("event"), done.facts["wandb_id"])


def test_what_the_server_has_is_not_sent_again(run_train, wandb):
    """Online, a killed run has sent what it has sent: the server names its next step."""
    has_ten_steps = FAKE.replace("Settings(), 0", "Settings(), 80")
    done = run_train("run", *ON, before=wandb(has_ten_steps))
    assert list(sent(done)[0]) == [8 * step for step in range(10, 31)]


@pytest.mark.parametrize("how", BROKEN)
def test_a_wandb_that_fails_is_one_line_and_training_continues(how, run_train, wandb):
    source, words = BROKEN[how]
    done = run_train("run", *ON, before=wandb(source))
    assert done.stderr == "", done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("wandb ")]
    said = [line for line in said if line != "wandb    somewhere"]
    assert len(said) == 1 and words in said[0] and "training continues without it" in said[0]
    assert len(read_rows(done.out_dir, "train")) == 30


def records_in(path):
    """The records of a .wandb file: LevelDB's log format behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 < len(data):
        if (left := 32768 - at % 32768) < 7:  # in this block
            at += left
        _, length, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(whole)
            whole = b""


@pytest.mark.slow
def test_the_real_wandb_holds_the_rows_and_the_resolved_knobs(run_train):
    """In its own file, after a kill and a resume."""
    offline = {"WANDB_MODE": "offline"}
    run_train("run", *ON, env=offline, before=stop_at(19, "SIGKILL"), code=137)
    done = run_train("run", *ON, env=offline)
    assert done.stderr == "" and "continues without it" not in done.stdout
    (path,) = done.out_dir.glob("wandb/offline-run-*/*.wandb")
    losses, config, ids = {}, {}, set()
    for record in records_in(path):
        config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        row = {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        losses |= {row["step"]: row.get("train/loss")} if "step" in row else {}
        ids |= {record.run.run_id} - {""}
    assert losses == {0: None} | {row["step"]: row["loss"] for row in done.rows("train")}
    assert (
        config["decay_steps"] == 30 and config["dtype"] == done.facts["config"]["dtype"] != "auto"
    )
    assert config["git_commit"] == done.facts["git"]["commit"] and config["parameters"] > 0
    assert config["versions"] == done.facts["versions"] and ids == {done.facts["wandb_id"]}


def test_the_lines_for_tensorboard_copy_every_row(tmp_path, monkeypatch):
    """Those of docs/forks.md: into a stand-in, and into TensorBoard's files where it is installed."""
    page = (REPO / "docs" / "forks.md").read_text()
    lines = re.search("python - .*<<'END'\n(.*?)^END$", page, re.MULTILINE | re.DOTALL)[1]
    rows = [*falling(3), evaluation(3, 1.5), event(3, "diverging", why="so")]
    monkeypatch.setattr(sys, "argv", ["-", str(write_run(tmp_path / "run", rows))])
    if find_spec("tensorboard"):
        exec(lines, {})
        assert list(tmp_path.glob("run/tensorboard/events*"))
    written = []
    add = types.SimpleNamespace(
        add_scalar=lambda *row: written.append(row), add_text=lambda *row: written.append(row)
    )
    stand_in = types.SimpleNamespace(SummaryWriter=lambda path: nullcontext(add))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    exec(lines, {})
    loss = "train/loss", rows[2]["loss"], 3
    assert {loss, ("eval/val_loss", 1.5, 3), ("diverging/why", "so", 3)} <= set(written)
