"""What is printed: columns that stay aligned, and what to type next."""

import contextlib
import fcntl
import math
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios

import pytest
from conftest import REPO, arguments

from plumbing import console

USUAL = {"loss": 1.8762, "grad_norm": 0.308, "lr": 4.99e-3, "step_ms": 44.6, "data_ms": 0.8}
USUAL |= {"step": 50, "tokens_per_sec": 91_912.3, "mfu": 0.125, "mem_gb": 0.53}
OTHERS = [
    {"loss": 12.3456, "grad_norm": 12345.6, "lr": 1e-10, "mfu": 1.0, "tokens_per_sec": 9.87e5},
    {"loss": 0.0003, "grad_norm": 1e-7, "step_ms": 1234.56, "data_ms": 999.9, "mfu": 0.00001},
    {"loss": math.nan, "grad_norm": math.inf, "lr": 0.0, "tokens_per_sec": 12.3, "mem_gb": 0.0001},
    {"mfu": None, "mem_gb": None},  # where nothing tells them
]


def columns(line, start):
    """Where each column of a line ends, from `start` on."""
    return [match.end() for match in re.finditer(r"\S+", line[start:])]


def test_columns_stay_aligned(capsys):
    table = console.Table(20_000_000)
    for row in ({}, *OTHERS):
        table.print_row(USUAL | row)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(OTHERS)
    start = len(table.progress(0))
    ends = [columns(line, start) for line in lines]
    heads = "loss norm lr ms wait tok/s mfu GB".split()
    assert lines[0].split()[1:-1] == heads
    assert all(each[: len(heads)] == ends[0][: len(heads)] for each in ends)


def on_a_terminal(code, columns=80, piped=True):
    """What a terminal gets from Python code, and what a pipe gets."""
    how = {"cwd": REPO, "env": os.environ | {"TERM": "xterm"}}
    command = [sys.executable, "-c", code]
    mine, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    process = subprocess.Popen(command, stdout=theirs, **how)
    other = subprocess.Popen(command, stdout=subprocess.PIPE, **how) if piped else None
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # at its end
        while part := os.read(mine, 1 << 16):
            shown += part
    os.close(mine)
    assert process.wait() == 0
    to_pipe = other.communicate()[0].decode() if piped else ""
    return shown.decode().replace("\r\n", "\n"), to_pipe


LINES = f"""
from plumbing import console
table = console.Table(2000)
for more in ({{}}, {{"z_loss": 0.5}}, {{"loss": 123456.0, "tokens_per_sec": 1.25e8, "step_ms": 1e6}}):
    table.print_row({USUAL} | more)
scores = {{"val_loss": 1.5, "val_bpb": 2.1, "val_accuracy": 0.5, "val_tokens": 100_000}}
table.print_evaluation({{"step": 50}} | scores | {{"val_code": 1.4, "val_words": 1.6}}, is_best=True)
why = "loss or gradient not finite, update after update"
console.print_event(50, "rollback", {{"why": why, "at_step": 60, "next_sequence": 480}})
"""


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_no_line_is_wider_than_the_terminal_and_a_pipe_has_all_columns(columns):
    shown, piped = on_a_terminal(LINES, columns)
    lines = re.sub(r"\x1b\[\d*[mK]", "", shown).splitlines()
    assert max(map(len, lines)) <= columns
    head, row, own, *_ = lines
    assert len(head.split()) == len(row.split()) and "z_loss" in own and "loss 1.5000" in shown
    words = " ".join(shown.split())
    assert "val_words 1.6" in words and "next_sequence 480" in words, "nothing is cut off"
    every = "step/total loss norm lr ms wait tok/s mfu GB left".split()
    assert piped.splitlines()[0].split() == every
    gone = {60: {"wait", "GB", "mfu", "lr"}, 80: {"wait", "GB"}}.get(columns, set())
    assert set(every) - set(head.split()) == gone


def test_a_run_has_colour_and_a_live_line_on_a_terminal_and_neither_in_a_pipe(data_dir, tmp_path):
    flags = arguments(tmp_path / "run", data_dir, ["--max_steps=40"])[1:]
    at_each_step = "train.console.LIVE_SECONDS = 0"
    shown, _ = on_a_terminal(f"import train; {at_each_step}; train.main({flags})", piped=False)
    live = r"\r\x1b\[K +\d+/40 +loss \d\.\d{4}  \d:\d\d:\d\d left\r"
    assert re.search(live, shown) and console.GREEN in shown and "finished" in shown
    _, piped = on_a_terminal(f"import train; train.main({[*flags, '--resume=restart']})")
    assert "\x1b" not in piped and "\r" not in piped and "best" in piped


def test_the_end_names_commands_that_run(run_train, tmp_path, capsys):
    done = run_train("a run", "--max_steps=5", "--log_interval=1")
    ends = done.stdout.splitlines()[-2:]
    assert all(line.startswith("python ") for line in ends)
    sample, report = (shlex.split(line, comments=True) for line in ends)
    assert "sample.py" in sample[1] and report[2] == "a run"
    console.print_next("finished", done.out_dir, {"data": {"meta": {}}})
    assert "sample.py" not in capsys.readouterr().out
