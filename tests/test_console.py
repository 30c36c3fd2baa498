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
from conftest import REPO

from plumbing import console

USUAL = {"loss": 1.8762, "grad_norm": 0.308, "lr": 4.99e-3, "step_ms": 44.6, "data_ms": 0.8}
USUAL |= {"step": 50, "tokens_per_sec": 91_912.3, "mfu": 0.125, "mem_gb": 0.53}
OTHERS = [
    {"loss": 12.3456, "grad_norm": 12345.6, "lr": 1e-10, "mfu": 1.0, "tokens_per_sec": 9.87e5},
    {"loss": 0.0003, "grad_norm": 1e-7, "step_ms": 1234.56, "data_ms": 999.9, "mfu": 0.00001},
    {"loss": math.nan, "grad_norm": math.inf, "mfu": math.nan, "tokens_per_sec": 12.3},
    {"loss": 0.0, "grad_norm": 0.0, "lr": 0.0, "data_ms": 0.0, "mem_gb": 0.0001},
    {"mfu": None, "mem_gb": None},  # where nothing tells them
]


def columns(line, start):
    """Where each column of a line ends, from `start` on."""
    return [match.end() for match in re.finditer(r"\S+", line[start:])]


@pytest.mark.parametrize("max_steps", [9, 20_000_000])
def test_columns_stay_aligned(max_steps, capsys):
    table = console.Table(max_steps)
    for row in ({}, *OTHERS):
        table.print_row(USUAL | row)
    header, *lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(OTHERS)
    start = len(table.progress(0))
    heads = "loss norm lr ms wait tok/s mfu GB".split()
    assert header.split()[1:-1] == heads
    ends = {tuple(columns(line, start)[: len(heads)]) for line in (header, *lines)}
    assert len(ends) == 1


def test_a_field_of_its_own_gets_a_column_of_its_own_from_the_row_that_has_it_first(capsys):
    table = console.Table(100)
    table.print_row(USUAL)
    for z_loss in (0.25, 1e-9):
        table.print_row(USUAL | {"z_loss": z_loss})
    first, _, header, *lines = capsys.readouterr().out.splitlines()
    assert "z_loss" not in first and header.split()[9:] == ["z_loss", "left"]
    assert [line.split()[9] for line in lines] == ["0.25", "1e-09"]


LOOP = f"""
import time
from plumbing import console
table = console.Table(1000)
table.print_evaluation({{"step": 0, "val_loss": 1.0}}, is_best=True)
table.print_evaluation({{"step": 0, "val_loss": 2.0}}, is_best=False)
table.print_row({USUAL})
end = time.monotonic() + 0.7
while time.monotonic() < end:
    table.live(60)
console.print0("the end")
"""


def on_a_terminal(code, columns=80):
    """What a terminal gets from Python code, and what a pipe gets."""
    how = {"cwd": REPO, "env": os.environ | {"TERM": "xterm", "COLUMNS": "0"}}  # 0: none is set
    command = [sys.executable, "-c", code]
    mine, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    process = subprocess.Popen(command, stdout=theirs, **how)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # at its end
        while part := os.read(mine, 1 << 16):
            shown += part
    os.close(mine)
    assert process.wait() == 0
    return shown.decode().replace("\r\n", "\n"), subprocess.check_output(command, text=True, **how)


def test_a_terminal_gets_colour_and_a_live_line_and_a_pipe_neither():
    shown, piped = on_a_terminal(LOOP)
    best, other, _, row, last = shown.strip("\n").split("\n")
    assert "val loss 1.0000" in best and console.GREEN in best and console.GREEN not in other
    *live, end = last.split("\r")
    assert 1 <= len(live) <= 5, "a few times a second"
    assert live[0] == console.CLEAR + "     60/1000     loss 1.8762 at step 50  0:00:41 left"
    assert end == console.CLEAR + "the end" and "1.8762" in row
    assert "\x1b" not in piped and "\r" not in piped and len(piped.splitlines()) == 5


LINES = f"""
from plumbing import console
table = console.Table(2000)
for more in ({{}}, {{"z_loss": 0.5}}, {{"loss": 123456.0, "tokens_per_sec": 1.25e8, "step_ms": 1e6}}):
    table.print_row({USUAL} | more)
scores = {{"val_loss": 1.5, "val_bpb": 2.1, "val_accuracy": 0.5, "val_tokens": 100_000}}
table.print_evaluation({{"step": 50}} | scores | {{"val_code": 1.4, "val_words": 1.6}}, is_best=True)
why = "loss or gradient not finite, update after update"
console.print_event(50, "diverging", {{"why": why, "at_step": 60, "next_sequence": 480}})
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


@pytest.mark.parametrize("columns", [60, 80])
def test_help_fits_the_terminal_with_its_introduction_and_cuts_no_word(columns):
    code = "import sys, prepare_data as p; sys.argv[1:] = ['--help']; p.main()"
    shown, piped = on_a_terminal(code, columns)
    assert max(map(len, shown.splitlines())) <= columns < max(map(len, piped.splitlines()))
    assert "".join(shown.split()) == "".join(piped.split())


def test_the_end_names_commands_that_run(run_train, tmp_path, capsys):
    done = run_train("a run", "--max_steps=5", "--log_interval=1")
    ends = done.stdout.splitlines()[-2:]
    assert all(line.startswith("python ") for line in ends)
    sample, report = (shlex.split(line, comments=True) for line in ends)
    assert "sample.py" in sample[1] and report[2] == "a run"
    console.print_next("finished", done.out_dir, {"data": {"meta": {}}})
    assert "sample.py" not in capsys.readouterr().out
