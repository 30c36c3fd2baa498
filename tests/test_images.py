"""examples/images.py: the loop does not know what it trains, and buffers such as BatchNorm's are as
safe as weights."""

import subprocess
import sys

import torch
from conftest import REPO, stop_at

EXAMPLE = REPO / "examples" / "images.py"
IMAGES = f"import sys; sys.path.insert(0, {str(EXAMPLE.parent)!r}); import images\n"
RUN = "--dataset=images --block_size=1 --max_steps=24 --save_interval=5 --keep_last=9".split()
RUN += "--dropout=0.2 --ema_decay=0.9 --eval_tokens=100".split()
NOT_A_NUMBER = """
def draw(self, batch, inner=images.Images.__getitem__):
    images, labels = inner(self, batch)
    if batch == (80, 8):  # the batch of step 11
        images[3] = float("nan")
    return images, labels
images.Images.__getitem__ = draw
"""


def buffers(path):
    """{name: value} of the buffers in a checkpoint."""
    model = torch.load(path, weights_only=True)["model"]
    return {name: w for name, w in model.items() if "running" in name or "tracked" in name}


def test_a_killed_run_resumes_bit_for_bit_with_buffers_and_dropout(run_train):
    whole = run_train("whole", *RUN, before=IMAGES)
    assert whole.returncode == 0, whole.stderr
    killed = run_train("run", *RUN, before=IMAGES + stop_at(18, "SIGKILL"))
    assert killed.returncode == 137
    resumed = run_train("run", *RUN, before=IMAGES)
    assert resumed.returncode == 0, resumed.stderr
    assert any(row["event"] == "resume" for row in resumed.rows("event"))
    assert resumed.fingerprint(24) == whole.fingerprint(24)
    (tracked,) = {int(b) for n, b in buffers(whole.checkpoint(24)).items() if "tracked" in n}
    assert tracked == 24, "each step, and nothing else, moved the buffers once"


def test_a_skipped_batch_leaves_weights_moments_and_buffers_as_they_were(run_train):
    flags = [*RUN, "--max_steps=11", "--schedule=constant", "--warmup_steps=0"]
    done = run_train("run", *flags, before=IMAGES + NOT_A_NUMBER)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in done.rows("train") if row["skipped"]] == [11]
    before, after = done.fingerprint(10), done.fingerprint(11)
    assert before.pop("state") != after.pop("state")
    assert before.pop("rng") != after.pop("rng"), "dropout was drawn"
    assert before == after

    healthy = run_train("healthy", *flags, before=IMAGES)
    assert healthy.fingerprint(10)["model"] == before["model"] != healthy.fingerprint(11)["model"]


def test_it_learns_from_any_directory_and_writes_a_report(tmp_path):
    flags = ["--max_steps=120", "--device=cpu", "--dtype=float32", f"--out_dir={tmp_path}/out"]
    done = subprocess.run(
        [sys.executable, EXAMPLE, *flags], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    accuracy = float(done.stdout.rpartition("accuracy ")[2].partition("%")[0])
    assert accuracy > 60, "chance is 10"
    assert "accuracy" in (tmp_path / "out" / "report.md").read_text()
