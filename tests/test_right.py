"""Where a user would lose work, or be told something false: one test for each, by a real run."""

import math
import os
import signal
import subprocess
import sys

import pytest
import torch
from conftest import arguments, codes, events, wait_for
from helpers import alive, build_trained, catches, free_port, listens, python
from sources import around, only_on, ranks, stop_at

import model
from plumbing import machine
from plumbing.cli import BadInput
from plumbing.safe_step import compiled

# ---- torch.compile -------------------------------------------------------------------------------

WORKING = """
torch.compile = lambda model, **options: lambda *batch: model(*batch)
"""
SIGNAL = "os.kill(os.getpid(), signal.SIGINT)"


def broken(sent="pass", call=1):
    """Source: the compiler fails in that call of the model, after `sent`."""
    return f"""
from torch._inductor.exc import CppCompileError
def broken(model, **options):
    calls = []
    def call(*batch):
        calls.append(1)
        if len(calls) == {call}:
            {sent}
            raise CppCompileError(["g++"], "it ended")
        return model(*batch)
    return call
torch.compile = broken
"""


def test_a_signal_during_compilation_is_no_failed_compilation(run_train):
    """Ctrl-C reaches the compiler, too, which then fails."""
    done = run_train("run", "--compile=true", before=broken(SIGNAL), code=130)
    assert done.facts["ended"] == "stopped by SIGINT" and not done.checkpoint(0).exists()
    assert events(done, "compile_failed") == []
    done = run_train("run", "--compile=true", before=WORKING)
    assert done.facts["run"]["compile"] is True
    assert [row["changed"] for row in events(done, "resume")] == []  # it has only begun


def test_a_fallback_to_eager_mode_is_logged_and_not_kept(run_train):
    flags = ("--compile=true", "--save_interval=4")
    run_train("run", *flags, before=WORKING + stop_at(3), code=143)
    done = run_train("run", *flags, before=broken() + stop_at(6), code=143)
    assert "compile failed: error" in done.stdout
    (failed,) = events(done, "compile_failed")
    assert failed["error"].endswith("Command: g++ Output: it ended")
    assert done.facts["run"]["compile"] is False
    done = run_train("run", *flags, before=WORKING)  # it tries again
    changes = [event["changed"]["compile"] for event in events(done, "resume")]
    assert changes == [[True, False], [False, True]]


@pytest.mark.parametrize("sent, code", [(SIGNAL, 130), ("pass", 1)])
def test_a_signal_during_a_later_compilation_is_a_stop(run_train, sent, code):
    flags = ("--compile=true", "--audit_interval=-1")
    done = run_train("run", *flags, before=broken(sent, call=6), code=code)
    assert ("Traceback" in done.stderr) == (code == 1), done.stderr
    assert done.facts["ended"].startswith("stopped by SIGINT") == (code == 130)


def test_no_shape_is_left_to_eager_mode():
    """Past its limit of 8, torch would compute later shapes in eager mode without an error."""
    compiled(torch.nn.Linear(2, 2))
    assert torch._dynamo.config.recompile_limit > 1000


CUT_SHORT = """
length = 5 + run.state["step"]
args = (*args[:2], *(part[:, :length] for part in args[2:4]), *args[4:])
"""
GROWING = around("train_step", CUT_SHORT)
TORCHS_LIMIT = around("first_pass", then="torch._dynamo.config.recompile_limit = 8")


@pytest.mark.slow  # compiles eleven shapes four times
@pytest.mark.parametrize("before, same", [(GROWING, True), (GROWING + TORCHS_LIMIT, False)])
def test_a_context_that_grows_resumes_exactly(run_train, before, same):
    flags = ("--compile=true", "--max_steps=11")
    whole = run_train("whole", *flags, before=before, timeout=400)
    run_train("run", *flags, before=before + stop_at(6), code=143, timeout=400)
    resumed = run_train("run", *flags, before=before, timeout=400)
    assert (resumed.fingerprint(11) == whole.fingerprint(11)) == same


# ---- the best, the schedule ----------------------------------------------------------------------


STALLED = ("--peak_lr=1e-12", "--min_lr=0", "--eval_interval=2")  # no evaluation improves


def test_a_plateau_of_another_run_does_not_lower_the_rate(run_train):
    plateau = ("--plateau_factor=0.5", "--plateau_patience=1")
    old = run_train("old", *STALLED, *plateau, "--save_interval=6")
    factor = torch.load(old.checkpoint(12), weights_only=True)["state"]["lr_factor"]
    assert factor < 1
    flags = (f"--resume={old.checkpoint(12)}", "--max_steps=18", "--schedule=cosine")
    new = run_train("new", *flags, "--decay_steps=30", "--peak_lr=1e-3", "--warmup_steps=1")
    rate = new.rows("train")[0]["lr"]
    assert rate == pytest.approx(1e-4 + 0.45e-3 * (1 + math.cos(math.pi * 11 / 29)))


def test_a_best_that_is_measured_again_is_the_one_to_beat(run_train):
    """Also where the run was stopped between two evaluations."""
    run_train("run", *STALLED, before=stop_at(5), code=143)
    done = run_train("run", *STALLED, "--eval_tokens=64")
    state = torch.load(done.checkpoint(12), weights_only=True)["state"]
    assert state["evals_since_best"] == 4  # at steps 6, 8, 10, 12


# ---- what a fork returns -------------------------------------------------------------------------


def test_what_evaluate_returns_is_a_number_with_a_loss(run_train):
    done = run_train("run", before=around("evaluate", then="result['own'] = torch.tensor(2.5)"))
    assert done.rows("eval")[0]["own"] == 2.5
    done = run_train("without", before="train.evaluate = lambda run: {'val_tokens': 3}", code=1)
    assert "expected val_loss" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_loss_that_is_not_finite_before_the_first_update_is_no_matter_of_the_rate(run_train):
    nan = around("forward_backward", then="result['loss'] = torch.tensor(math.nan)")
    done = run_train("run", before=nan, code=1)
    assert "the loss is NaN at step 0" in done.stderr
    assert "--peak_lr" not in done.stderr


# ---- ranks ---------------------------------------------------------------------------------------


def waiting_rank(data_dir, tmp_path, wrapped=False):
    """(process, port) of a rank 0 whose partner never comes."""
    port = free_port()
    environment = os.environ | {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, *arguments(tmp_path / "run", data_dir, ())]
    if wrapped:  # by a launcher that can die
        program = "import subprocess, sys, time; p = subprocess.Popen(sys.argv[1:])"
        program += "; print(p.pid, flush=True); time.sleep(100)"
        command = [sys.executable, "-c", program, *command]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True), port


def test_a_rank_that_waits_for_another_can_be_ended(data_dir, tmp_path):
    process, port = waiting_rank(data_dir, tmp_path)
    wait_for(lambda: listens(port), 60)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == -signal.SIGTERM


@pytest.mark.parametrize("where", ["the import of torch", "the rendezvous"])
def test_a_rank_whose_launcher_dies_while_it_waits_ends_by_itself(data_dir, tmp_path, where):
    launcher, port = waiting_rank(data_dir, tmp_path, wrapped=True)
    pid = int(launcher.stdout.readline())
    wait_for(lambda: listens(port) if where == "the rendezvous" else catches(pid, "SIGUSR1"), 60)
    assert alive(pid)
    launcher.kill()
    launcher.wait()
    wait_for(lambda: not alive(pid), 10 if where == "the rendezvous" else 60)


def test_the_rank_that_has_the_cause_prints_it(run_train):
    fails = around("configure_optimizers", "train.fail('the model does not fit into this memory')")
    done = run_train("run", "--hang_minutes=0.2", before=ranks(2, only_on(1, fails)), code=None)
    assert codes(done).endswith("2"), done.stderr
    assert done.stderr.count("the model does not fit into this memory") == 1
    assert "another rank" in done.stderr and "Traceback" not in done.stderr


def test_a_dead_worker_is_told_by_its_rank(run_train):
    die = around("ShuffledWindows.__getitem__", "if args[1][0] >= 5 * 8: os._exit(9)")
    flags = ("--batch_size=4", "--num_workers=1", "--hang_minutes=0.2")
    done = run_train("run", *flags, before=ranks(2, only_on(1, die)), code=1)
    assert codes(done) == "1 1" and done.stderr.count("DataLoader worker (pid") == 1, done.stderr


def test_a_window_holds_in_every_path_of_attention(monkeypatch):
    def window(n, T, device):
        place = torch.arange(T)
        distance = place[T - n :, None] - place[None, :]
        return (distance >= 0) & (distance < 4)

    gpt = build_trained(block_size=16).eval()
    tokens = torch.randint(65, (2, 16))
    causal = gpt(tokens)
    monkeypatch.setattr(model, "visible", window)
    plain = gpt(tokens)
    assert (plain - causal).abs().max() > 1e-3  # the control
    assert torch.allclose(gpt(tokens, last_only=True), plain[:, -1:], atol=1e-5)
    monkeypatch.setattr(model, "PLAIN_ATTENTION_MAX", 0)
    assert torch.allclose(gpt(tokens), plain, atol=1e-5)


def test_cublas_finds_its_setting_when_train_is_imported(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    source = "import train, os; print(os.environ['CUBLAS_WORKSPACE_CONFIG'])"
    assert python(source) == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(BadInput, match="expected :4096:8 or :16:8"):
        machine.set_deterministic(True, torch.device("cuda"))
