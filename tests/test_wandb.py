"""wandb gets every row at most once, under one id, across kills; whatever it does, training goes
on."""

import json
import struct
import sys
import types

import pytest
from conftest import read_rows
from sources import at_step, stop_at

from reporting.wandb_log import Wandb

ON = ("--wandb_log=true", "--max_steps=30", "--eval_interval=10", "--save_interval=10")
ON += ("--log_interval=1",)
OFFLINE = {"WANDB_MODE": "offline"}


def history(out_dir):
    """[rows] of each offline run below out_dir, oldest first, read from the .wandb files
    themselves.

    Such a file is a log as LevelDB writes it: 7 bytes of header, then blocks of 32 KiB that hold
    parts of records, each after a checksum (4 bytes), its length (2) and its type (1: whole, 2:
    first part, 3: a middle one, 4: the last). A record is a protobuf."""
    from wandb.proto.wandb_internal_pb2 import Record

    folders = []
    for path in sorted(out_dir.glob("wandb/offline-run-*/*.wandb")):
        content, place, whole, rows = path.read_bytes(), 7, b"", []
        assert content[:4] == b":W&B"
        while place < len(content):
            if 32768 - place % 32768 < 7:
                place += 32768 - place % 32768
            _, length, kind = struct.unpack_from("<IHB", content, place)
            whole += content[place + 7 : place + 7 + length]
            place += 7 + length
            if kind in (1, 4):
                record, whole = Record.FromString(whole), b""
                items = record.history.item
                row = {item.key or ".".join(item.nested_key): item.value_json for item in items}
                row = {key: json.loads(value) for key, value in row.items()}
                if row:
                    rows.append(row)
        folders.append(rows)
    return folders


def merged(out_dir):
    """{step: the train and the eval row of metrics.jsonl in one}"""
    steps = {}
    for row in read_rows(out_dir):
        if row.pop("kind") != "event":
            steps.setdefault(row["step"], {}).update(row)
    return steps


def without(row, *more):
    return {k: v for k, v in row.items() if k not in {"_step", "_runtime", "_timestamp", *more}}


# ---- what arrives --------------------------------------------------------------------------------


def test_every_row_arrives_and_no_bit_of_the_run_changes(run_train):
    done = run_train("run", *ON, env=OFFLINE)
    assert done.stderr == "", done.stderr
    (rows,) = history(done.out_dir)
    assert {row["step"]: without(row) for row in rows} == merged(done.out_dir)
    assert [row["_step"] for row in rows] == [8 * step for step in range(31)]
    without_wandb = run_train("without", *ON, "--wandb_log=false", env=OFFLINE)
    assert "wandb" not in without_wandb.stdout and not list(without_wandb.out_dir.glob("wandb*"))
    assert without_wandb.fingerprint(30) == done.fingerprint(30)


def test_after_kills_every_row_arrives_once_and_the_run_stays_one(run_train):
    """The second kill comes before the first one's last row, which metrics.jsonl then lacks."""
    kill = "time.sleep(0.5); os.kill(os.getpid(), 9)"
    for step in (19, 14):
        run_train("run", *ON, env=OFFLINE, before=at_step(step, kill), code=137)
    stopped = run_train("run", *ON, env=OFFLINE, before=stop_at(22, "SIGINT"), code=130)
    assert stopped.stderr == ""  # Ctrl-C stays ours
    assert len(history(stopped.out_dir)[0]) == 23
    done = run_train("run", *ON, env=OFFLINE)
    (rows,) = history(done.out_dir)
    assert [row["_step"] for row in rows] == [8 * step for step in range(31)]
    assert {row["step"]: without(row) for row in rows} == merged(done.out_dir)
    # offline-run-DATE_TIME-ID, and "-1" behind it for a second session within one second
    folders = done.out_dir.glob("wandb/offline-run-*")
    assert {path.name.split("-")[3] for path in folders} == {done.facts["wandb_id"]}


def test_what_the_server_has_is_not_sent_again(tmp_path, monkeypatch):
    """Online, a killed run has sent what it has sent: the server names its next step."""
    server = types.ModuleType("wandb")
    exec(FAKE, vars(server))
    server.Run.starting_step = 80
    sent = []
    server.Run.log = lambda self, row, step: sent.append(step)
    monkeypatch.setitem(sys.modules, "wandb", server)
    sender = Wandb(tmp_path, {}, "abcd")
    for i in range(13):
        sender.send({"kind": "train", "loss": 1.0, "sequences": 8 * i})
    sender.finish(0)
    assert sent == [80, 88, 96]


# ---- a wandb that does not work ------------------------------------------------------------------

FAKE = """
import time
class Settings:
    mode = "offline"
    sync_dir = ""
    def __init__(self, *_, **__): self.settings = self
setup = Settings
class Run:
    url, settings, starting_step = "somewhere", Settings(), 0
    def define_metric(self, *_, **__): pass
    def log(self, row, step): pass
    def finish(self, exit_code): pass
def init(**_): return Run()
"""
BROKEN = {
    "is missing": ("raise ImportError('No module named wandb')", "No module named wandb"),
    "breaks when it is imported": ("raise OSError('no home')", "no home"),
    "breaks when it starts": (FAKE + "def init(**_): raise OSError('quota')", "quota"),
    "breaks in mid-run": (FAKE + "def log(*_, **__): 1 / 0\nRun.log = log", "division by zero"),
    "breaks at the end": (FAKE + "def f(*_, **__): 1 / 0\nRun.finish = f", "division by zero"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_wandb_that_fails_is_one_line_and_training_continues(how, run_train, tmp_path):
    source, words = BROKEN[how]
    (tmp_path / "wandb.py").write_text(source)
    found_first = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    done = run_train("run", *ON, before=found_first)
    assert done.stderr == "", done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("wandb ")]
    said = [line for line in said if line != "wandb    somewhere"]
    assert len(said) == 1 and words in said[0] and "training continues without it" in said[0]
    assert len(read_rows(done.out_dir, "train")) == 30
