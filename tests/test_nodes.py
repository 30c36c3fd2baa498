"""Several nodes are one run, too: each node here is a torchrun of its own, on this machine."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO, arguments, fingerprint, wait_for
from helpers import ONE_THREAD, children, free_port, listens
from sources import ranks

FLAGS = ("--save_interval=20", "--log_interval=20", "--dropout=0.1")
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


# ---- a node that dies ----------------------------------------------------------------------------


def node(port, address):
    """The command of one node. Of several, the lowest address gets rank 0."""
    module = [sys.executable, "-m", "torch.distributed.run"]
    where = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--local-addr={address}"]
    soon = ["--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=2", "--monitor-interval=0.1"]
    return [*module, "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", *where, *soon]


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["launcher of rank 0", "launcher of rank 1", "node of rank 0"])
def test_a_node_that_dies_and_comes_back_changes_no_bit(start_train, run_train, tmp_path, lost):
    flags = (*FLAGS, "--max_steps=400")
    straight = run_train("straight", *flags, before=ranks(2))
    port, number = free_port(), int("rank 1" in lost)
    addresses = ["127.0.0.1", "127.0.0.2"]

    def start(which):
        launcher = node(port, addresses[which])
        return start_train("run", *flags, launcher=launcher, env=ONE_THREAD | FRESH_STORE)

    stays = start(1 - number)  # its node keeps the rendezvous too, and must not die
    wait_for(lambda: listens(port))
    dies = start(number)
    log = (stays if number else dies).log  # rank 0 writes the one log
    wait_for(lambda: re.search(r"\b60/400 ", log.read_text()))
    pids = children(dies)
    dies.kill()
    if lost.startswith("node"):
        os.kill(pids[0], signal.SIGKILL)
    back = start(number)
    assert [stays.wait(90), back.wait(30)] == [0, 0], stays.log.read_text() + back.log.read_text()
    assert "resumes from" in (stays if number else back).log.read_text()
    assert fingerprint(tmp_path / "run/ckpt_00000400.pt") == straight.fingerprint(400)


def test_restarts_that_could_not_work_are_refused_with_what_to_type(run_train):
    told = {"WORLD_SIZE": "2", "RANK": "0", "GROUP_WORLD_SIZE": "2"}
    told |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}
    refused = run_train("run", env=told, code=2)
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun" in refused.stderr
    assert not refused.out_dir.exists()


# ---- docs/train.slurm ----------------------------------------------------------------------------

# What stands in for SLURM: each starts, signals or notes what the real command would.
SLURM = {
    "srun": """
while [[ $1 == --* ]]; do shift; done
for node in $(seq "$SLURM_NNODES"); do "$@" & pids+=($!); done
echo "${pids[@]}" >"$JOB/step"
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit "${code:-0}"
""",
    "scancel": """
[[ "$*" == "--signal=TERM $SLURM_JOB_ID" ]] || exit 2
for pid in $(cat "$JOB/step"); do kill -TERM "$pid" $(pgrep -P "$pid"); done
""",
    "scontrol": """
[[ $1 == show ]] && echo 127.0.0.1 || echo "$@" >>"$JOB/queue"
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_slurm_script_requeues_and_resumes(run_train, data_dir, tmp_path, nodes):
    flags = (*FLAGS, "--max_steps=60")
    straight = run_train("straight", *flags, before=ranks(2))
    for name, source in SLURM.items():
        (tmp_path / name).write_text("#!/usr/bin/env bash" + source)
        (tmp_path / name).chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    job = {"SLURM_JOB_ID": str(free_port() % 10000), "SLURM_JOB_NODELIST": f"node[1-{nodes}]"}
    job |= {"SLURM_NNODES": str(nodes), "SLURM_GPUS_ON_NODE": str(2 // nodes)}
    environment = os.environ | ONE_THREAD | job | {"PATH": path, "JOB": str(tmp_path)}
    command = ["bash", "docs/train.slurm", *arguments(tmp_path / "run", data_dir, flags)[1:]]

    def batch_shell(log):
        out = log.open("w")
        return subprocess.Popen(command, cwd=REPO, env=environment, stdout=out, stderr=out)

    first = batch_shell(tmp_path / "log")
    wait_for(lambda: re.search(r"\b20/60 ", (tmp_path / "log").read_text()))
    first.send_signal(signal.SIGUSR1)  # as SLURM does ahead of the time limit
    assert first.wait(30) == 1  # torchrun's own code
    assert (tmp_path / "queue").read_text() == f"requeue {job['SLURM_JOB_ID']}\n"
    assert "stopped by SIGTERM at step" in (tmp_path / "log").read_text()

    environment["RANK_LOGS"] = str(tmp_path / "ranks")
    again = batch_shell(tmp_path / "log_2")
    assert again.wait(60) == 0, (tmp_path / "log_2").read_text()
    assert (tmp_path / "queue").read_text().count("requeue") == 1
    assert "resume: checkpoint" in (tmp_path / "log_2").read_text()
    assert len(list((tmp_path / "ranks").rglob("stdout.log"))) == 2
    assert fingerprint(tmp_path / "run/ckpt_00000060.pt") == straight.fingerprint(60)
