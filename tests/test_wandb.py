"""wandb gets every row once, under one id, across kills; and whatever it does, training goes on."""

import json
import os
import signal
import struct
import subprocess
import sys

import pytest
from conftest import REPO, read_rows, wait_for

CLOCK = set("step_ms data_ms tokens_per_sec mfu mem_gb gpu_util".split())
ON = ("--wandb_log=true", "--max_steps=30", "--eval_interval=10", "--save_interval=10")
OFFLINE = {"WANDB_MODE": "offline"}


def history(out_dir):
    """[rows] of each offline run below out_dir, oldest first, read from the .wandb files themselves.

    Such a file is a log as LevelDB writes it: 7 bytes of header, then blocks of 32 KiB that hold parts
    of records, each after a checksum (4 bytes), its length (2) and its type (1: whole, 2: first part,
    3: a middle one, 4: the last). A record is a protobuf.
    """
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


def ids(out_dir):
    return {path.name.split("-")[-1] for path in out_dir.glob("wandb/offline-run-*")}


def test_every_row_arrives_once_also_after_a_kill(start_train, run_train, tmp_path):
    killed = start_train("run", *ON, "--log_interval=3", "--max_steps=2000000", env=OFFLINE)
    metrics, sent = tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / "wandb.json"
    wait_for(lambda: sent.exists() and json.loads(sent.read_text())["sent"] > 50)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    reached = [json.loads(line)["step"] for line in metrics.read_text().splitlines()[:-1]][-1]
    before = merged(tmp_path / "run")
    done = run_train("run", *ON, f"--max_steps={reached + 30}", env=OFFLINE)
    assert done.returncode == 0, done.stderr
    first, second = history(done.out_dir)
    record = merged(done.out_dir)
    assert ids(done.out_dir) == {json.loads(sent.read_text())["id"]}  # one run to wandb

    rows = first + second
    assert [row["step"] for row in rows] == list(record)  # every step once, in order, 0 included
    assert [row["_step"] for row in rows] == list(record)
    again = {row["step"] for row in first} - {
        step for step in record if without(record[step]) == without(before.get(step, {}))
    }
    assert len(again) < 30  # what lay past the checkpoint and was computed a second time
    for row in rows:
        ignored = CLOCK if row["step"] in again else ()
        assert without(row, *ignored) == without(record[row["step"]], *ignored)
    assert sum("val_loss" in row for row in rows) == len(read_rows(done.out_dir, "eval"))


def test_a_rollback_does_not_turn_wandb_back(run_train):
    poison = """
def train_step(model, run, tokens, targets, lr, inner=train.train_step):
    if 12 <= run.state["batch_index"] < 15:
        run.model.head.weight.data.mul_(float("nan"))
    return inner(model, run, tokens, targets, lr)
train.train_step = train_step
"""
    done = run_train("run", *ON, "--max_skipped=3", "--log_interval=1", env=OFFLINE, before=poison)
    assert done.returncode == 0, done.stderr
    (rows,) = history(done.out_dir)
    counter = [row["_step"] for row in rows]
    assert counter == sorted(set(counter)) and counter[-1] == 35  # five batches were given up
    record = merged(done.out_dir)
    latest = {row["step"]: row for row in rows}  # of what was computed twice, the latter
    assert {step: without(row) for step, row in latest.items()} == record
    nulls = [row for row in rows if row["loss" if row["step"] else "val_loss"] is None]
    assert all(row["finite"] is False for row in nulls)


BROKEN = {
    "is missing": ("raise ImportError('No module named wandb')", "is not installed"),
    "breaks when it starts": ("raise OSError('no home')", "no home"),
    "dies in mid-run": (
        """
import os, signal
class Settings(dict): silent = mode = sync_dir = None
def setup(*_): return type("Setup", (), {"settings": Settings()})
class Run:
    url, settings = "somewhere", Settings()
    def define_metric(self, *_, **__): pass
    def log(self, row, **_): os.kill(os.getpid(), signal.SIGKILL)
def init(**_): return Run()
""",
        "was cut off",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_wandb_that_fails_is_said_in_one_line(how, run_train, tmp_path):
    source, words = BROKEN[how]
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "wandb.py").write_text(source)
    path = f"{tmp_path}/broken:{os.environ.get('PYTHONPATH', '')}"
    done = run_train("run", *ON, env={"PYTHONPATH": path})
    assert done.returncode == 0 and done.stderr == "", done.stderr
    said = [line for line in done.stdout.splitlines() if "to_wandb.py" in line]
    assert len(said) == 1 and words in said[0]
    assert len(read_rows(done.out_dir, "train")) == 30


def test_nobody_is_asked_for_a_key(run_train, tmp_path):
    nowhere = {
        "HOME": str(tmp_path),
        "WANDB_MODE": "online",
        "WANDB_BASE_URL": "http://127.0.0.1:1",
    }
    done = run_train("run", *ON, env=nowhere | {"WANDB_API_KEY": "", "NETRC": "/nonexistent"})
    assert done.returncode == 0, done.stderr
    assert "not logged in; type: wandb login" in done.stdout
    assert "API key" not in done.stdout + done.stderr


def test_a_run_is_sent_after_the_fact(run_train):
    done = run_train("run", *ON, "--wandb_log=false")
    assert not list(done.out_dir.glob("wandb*")) and "wandb" not in done.stdout  # it was off
    command = [sys.executable, str(REPO / "to_wandb.py"), str(done.out_dir)]
    for _ in range(2):  # the second finds nothing left to send
        subprocess.run(command, env=os.environ | OFFLINE, check=True, timeout=60)
    rows, nothing = history(done.out_dir)
    assert {row["step"]: without(row) for row in rows} == merged(done.out_dir) and not nothing
    refused = subprocess.run([*command[:2], "/nonexistent"], capture_output=True, text=True)
    assert refused.returncode == 2 and "out/NAME" in refused.stderr
