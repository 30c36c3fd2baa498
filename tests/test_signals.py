"""Signals are heard while a run lasts, and handled as before once it is over."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO, first, wait_for
from helpers import catches, python

HOLD = """
import os, signal, sys
from plumbing.signals import held, hold
hold()
assert "torch" not in sys.modules
os.kill(os.getpid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGINT)
with held() as asked:
    print(int(asked.stop), asked.save, flush=True)
    os.kill(os.getpid(), signal.SIGHUP)
    print(int(asked.stop), flush=True)
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "given back as it was before hold()"
with held() as again:
    assert not again.stop and not again.save, "told once"
"""


def test_signals_that_come_while_torch_is_imported_are_not_lost():
    assert python(HOLD) == "15 True\n15"


def test_a_second_ctrl_c_ends_a_process_that_still_imports_torch():
    code = "import os, signal; from plumbing.signals import hold; hold()"
    for before_it in ("", "from plumbing.signals import held; held().__enter__();"):
        kill = f"os.kill(os.getpid(), signal.SIGINT); {before_it}"
        command = [sys.executable, "-c", f"{code}; {kill} os.kill(os.getpid(), signal.SIGINT)"]
        assert subprocess.run(command, cwd=REPO).returncode == -signal.SIGINT


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("name", first(1, ["SIGINT", "SIGUSR1"]))
def test_a_signal_in_the_first_second_stops_or_saves_a_run(start_train, tmp_path, name):
    process = start_train("run", "--save_interval=100")
    wait_for(lambda: catches(process.pid, name) and catches(process.pid, "SIGUSR1"))
    os.kill(process.pid, signal.Signals[name])
    code = process.wait(60)
    log = process.log.read_text()
    assert code == (130 if name == "SIGINT" else 0), log
    assert "Traceback" not in log
    assert (tmp_path / "run" / "ckpt_00000001.pt").exists() == (name == "SIGINT")
