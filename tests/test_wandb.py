"""wandb gets every row once, under one id, across kills; and whatever it does, training goes on."""

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO, read_rows, wait_for

from plumbing import wandb_sender

SENDER = str(REPO / "plumbing" / "wandb_sender.py")
CLOCK = set("step_ms data_ms tokens_per_sec mfu mem_gb gpu_util".split())
ON = ("--wandb_log=true", "--max_steps=30", "--eval_interval=10", "--save_interval=10")
OFFLINE = {"WANDB_MODE": "offline"}


def history(out_dir):
    """[rows] of each offline run below out_dir, oldest first, read from the .wandb files themselves.

    Such a file is a log as LevelDB writes it: 7 bytes of header, then blocks of 32 KiB that hold parts
    of records, each after a checksum (4 bytes), its length (2) and its type (1: whole, 2: first part,
    3: a middle one, 4: the last). A record is a protobuf.

    What a killed sender left is no longer there: it was set aside under another name.
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
    """offline-run-DATE_TIME-ID, and "-1" behind it for a second session within one second."""
    return {path.name.split("-")[3] for path in sessions(out_dir)}


def sessions(out_dir):
    return sorted(out_dir.glob("wandb/offline-run-*"))


def wandb_bytes(session):
    """Of whole blocks in the file that wandb writes: it keeps the last one back for some seconds."""
    return sum(path.stat().st_size // 32768 for path in session.glob("*.wandb")) * 32768


def remembered(out_dir):
    path = out_dir / "wandb.json"
    return json.loads(path.read_text()) if path.exists() else {}


# ---- a run that is written by hand ---------------------------------------------------------------

ENDED = '{"ended": "finished"}'  # run.json


@pytest.fixture
def send():
    """send(folder, follow=False) -> Popen: the sender alone, of a run that the test writes itself."""
    started = []

    def start(folder, follow=False):
        (folder / "run.json").write_text("{}" if follow else ENDED)
        command = [sys.executable, SENDER, folder.name, *[str(os.getpid())][:follow]]
        process = subprocess.Popen(command, cwd=folder.parent, env=os.environ | OFFLINE)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def rows_of(first, last):
    """Rows as a run writes them: steps `first` to `last`, of 8 sequences, evaluated every tenth."""
    rows = []
    for step in range(first, last + 1):
        if step:
            loss = {"loss": 5 - step / 100, "padding": "x" * 200}
            rows.append({"kind": "train", "step": step, "sequences": 8 * step} | loss)
        if step % 10 == 0:
            rows.append({"kind": "eval", "step": step, "val_loss": 5 - step / 100})
    return rows


def write_rows(folder, rows, replace=False):
    path = folder / "metrics.jsonl"
    target = folder / "new" if replace else path
    with open(target, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    os.replace(target, path)


def is_at_end_of(process, path):
    """Has the process read all of the file? (Linux says where in it each of its open files is.)"""
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed in the meantime
            if link.readlink() == path:
                place = (link.parent.parent / "fdinfo" / link.name).read_text().split()[1]
                return int(place) == path.stat().st_size
    return False


# ---- a run that is killed ------------------------------------------------------------------------


def test_every_row_arrives_once_also_after_a_kill(start_train, run_train, tmp_path):
    out_dir = tmp_path / "run"
    killed = start_train("run", *ON, "--log_interval=3", "--max_steps=1000000", env=OFFLINE)
    wait_for(lambda: killed.poll() or sum(map(wandb_bytes, sessions(out_dir))) > 0)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    before = merged(out_dir)
    reached = max(before)
    done = run_train("run", *ON, f"--max_steps={reached + 30}", env=OFFLINE)
    assert done.returncode == 0, done.stderr
    # A slow machine may have cut it off. This waits for the senders of both runs.
    subprocess.run([sys.executable, SENDER, str(out_dir)], env=os.environ | OFFLINE, check=True)

    rows = [row for rows in history(out_dir) for row in rows]
    record = merged(out_dir)
    assert ids(out_dir) == {remembered(out_dir)["id"]}  # one run to wandb
    assert [row["step"] for row in rows] == list(record)  # every step once, in order, 0 included
    assert [row["_step"] for row in rows] == [8 * step for step in record]
    again = {step for step in before if without(record[step]) != without(before[step])}
    assert len(again) < 30  # what lay past the checkpoint and was computed a second time
    for row in rows:
        ignored = CLOCK if row["step"] in again else ()
        assert without(row, *ignored) == without(record[row["step"]], *ignored)
    assert sum("val_loss" in row for row in rows) == len(read_rows(out_dir, "eval"))


def test_a_resumed_run_removes_no_temporary_file_but_its_own(run_train):
    """The sender of a killed run may be at work: it is about to rename wandb.json.tmp."""
    done = run_train("run")
    (done.out_dir / "wandb.json.tmp").write_text("{}")
    (done.out_dir / "run.json.tmp").write_text("{")
    done = run_train("run", "--max_steps=20")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in done.out_dir.glob("*.tmp")] == ["wandb.json.tmp"]


def test_no_step_is_sent_twice_when_a_resumed_run_replaces_the_rows(send, tmp_path):
    """The sender of a killed run is not done yet when the next run cuts metrics.jsonl back."""
    write_rows(tmp_path, rows_of(0, 50))
    sender = send(tmp_path, follow=True)
    wait_for(lambda: "unfinished" in remembered(tmp_path))  # it is about to read the first rows
    wait_for(lambda: is_at_end_of(sender, tmp_path / "metrics.jsonl"))
    write_rows(tmp_path, rows_of(0, 40), replace=True)
    write_rows(tmp_path, rows_of(41, 60))
    (tmp_path / "run.json").write_text(ENDED)
    assert sender.wait(60) == 0
    (rows,) = history(tmp_path)
    assert [row["step"] for row in rows] == list(range(61))
    assert [row["_step"] for row in rows] == [8 * step for step in range(61)]


def test_rows_that_a_killed_wandb_lost_are_sent_again(send, tmp_path):
    write_rows(tmp_path, rows_of(0, 400))
    sender = send(tmp_path, follow=True)
    wait_for(lambda: sum(map(wandb_bytes, sessions(tmp_path))) > 0)
    sender.kill()  # wandb's own process goes on for a moment
    assert send(tmp_path).wait(60) == 0
    (rows,) = history(tmp_path)
    assert [row["step"] for row in rows] == list(range(401))


def test_two_senders_at_once_send_each_row_once(send, tmp_path):
    write_rows(tmp_path, rows_of(0, 20))
    both = send(tmp_path), send(tmp_path)
    assert [sender.wait(60) for sender in both] == [0, 0]
    assert sorted(len(rows) for rows in history(tmp_path)) == [0, 21]
    assert ids(tmp_path) == {remembered(tmp_path)["id"]}


def test_a_rollback_does_not_turn_wandb_back(run_train):
    poison = """
def train_step(model, run, *rest, inner=train.train_step):
    if 12 * 8 <= run.state["sequences"] < 15 * 8:
        run.model.head.weight.data.mul_(float("nan"))
    return inner(model, run, *rest)
train.train_step = train_step
"""
    done = run_train("run", *ON, "--max_skipped=3", "--log_interval=1", env=OFFLINE, before=poison)
    assert done.returncode == 0, done.stderr
    (rows,) = history(done.out_dir)
    counter = [row["_step"] for row in rows]
    assert counter == sorted(set(counter)) and counter[-1] == 35 * 8  # five batches were given up
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
class Settings(dict): silent = mode = None; sync_dir = ""
def setup(*_): return type("Setup", (), {"settings": Settings()})
class Run:
    url, settings, starting_step = "somewhere", Settings(), 0
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
    said = [line for line in done.stdout.splitlines() if "wandb_sender.py" in line]
    assert len(said) == 1 and words in said[0]
    assert len(read_rows(done.out_dir, "train")) == 30


def test_a_wandb_that_hangs_is_cut_off_and_one_that_cannot_start_is_said(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text("import time\ntime.sleep(600)")
    (tmp_path / "run.json").write_text("{}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said = []
    with wandb_sender.sending(tmp_path, said.append, patience=0.5):
        pass
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    with wandb_sender.sending(tmp_path, said.append):
        pass
    cut_off, not_started = said
    command = f"python plumbing/wandb_sender.py {tmp_path} sends the rest"
    assert "was cut off" in cut_off and command in cut_off
    assert "No such file" in not_started and command in not_started


def test_the_sender_starts_without_torch():
    source = "import sys, plumbing.wandb_sender; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", source], cwd=REPO, check=True)


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
    command = [sys.executable, SENDER, str(done.out_dir)]
    for _ in range(2):  # the second finds nothing left to send
        subprocess.run(command, env=os.environ | OFFLINE, check=True, timeout=60)
    rows, nothing = history(done.out_dir)
    assert {row["step"]: without(row) for row in rows} == merged(done.out_dir) and not nothing
    refused = subprocess.run([*command[:2], "/nonexistent"], capture_output=True, text=True)
    assert refused.returncode == 2 and "out/NAME" in refused.stderr
