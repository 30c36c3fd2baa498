"""Weights & Biases, the real one, offline: each row arrives, under one id, with our own step. What is
read is the file that `wandb sync` would send."""

import json
import struct

import pytest
from sources import around

wandb = pytest.importorskip("wandb")
ON = ("--wandb_log=true", "--max_steps=8", "--eval_interval=4", "--log_interval=1")
OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_X_DISABLE_STATS": "true"}
# A fork that logs a picture at each evaluation, which moves the step of wandb's own.
PICTURE = """
def log_picture(run, row):
    if row["kind"] == "eval":
        import wandb
        for _ in range(3):
            run.wandb.log({"picture": wandb.Image(np.zeros((4, 4)))})
train.on_row.append(log_picture)
"""


@pytest.fixture
def train(run_train):
    """train(out_dir, *flags, ...): run_train with W&B on, offline."""
    return lambda out_dir, *flags, **how: run_train(out_dir, *ON, *flags, env=OFFLINE, **how)


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


def sent(folder):
    """(rows of numbers, config, ids, the metric that is the x-axis of all, exit codes) of all
    sessions below `folder`."""
    rows, config, ids, axes, codes = [], {}, set(), {}, []
    for path in sorted(folder.rglob("*.wandb"), key=lambda path: path.stat().st_mtime):
        for record in records_in(path):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                items = record.history.item
                row = {(i.key or i.nested_key[0]): json.loads(i.value_json) for i in items}
                rows += [row] if "step" in row else []
            elif kind == "run":
                config |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
                ids.add(record.run.run_id)
            elif kind == "metric":
                name = record.metric.glob_name or record.metric.name
                axes[name] = record.metric.step_metric
            elif kind == "exit":
                codes.append(record.exit.exit_code)
    return rows, config, ids, axes, codes


def losses(rows, name):
    return {row["step"]: row[name] for row in rows if name in row}


def test_each_row_arrives_under_one_id_whatever_else_is_logged_and_after_a_failure(
    train, run_train, tmp_path
):
    """A failure, which is shown as one, a resume, and pictures of a fork; no bit of the run
    changes."""
    fails = around("train_step", "if run.state['step'] == 5: raise ValueError('of mine')")
    assert "ValueError: of mine" in train("run", before=PICTURE + fails, code=1).stderr
    done = train("run", before=PICTURE)
    rows, config, ids, axes, codes = sent(tmp_path)
    assert losses(rows, "train/loss") == {row["step"]: row["loss"] for row in done.rows("train")}
    evaluations = {row["step"]: row["val_loss"] for row in done.rows("eval")}
    assert losses(rows, "eval/val_loss") == evaluations and set(evaluations) == {0, 4, 8}
    assert axes["*"] == "step"  # by which curves are drawn, whatever moved wandb's own
    assert ids == {done.facts["wandb_id"]} and codes == [1, 0]
    assert config["peak_lr"] == 1e-3 and config["decay_steps"] == 8  # as resolved
    without = run_train("without", *ON, "--wandb_log=false")
    assert without.fingerprint(8) == done.fingerprint(8)


def test_without_the_package_it_is_one_line_and_nothing_is_trained(train):
    missing = "import sys; sys.modules['wandb'] = None\n"
    done = train("run", before=missing, code=2)
    done.is_one_line("wandb is not installed; type: pip install wandb")
    assert not done.out_dir.exists()
