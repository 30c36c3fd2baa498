"""For tests/gpu.sh: generates the tokens that it trains on, kills a run, tabulates what was measured.

python tests/gpu_report.py tokens FOLDER COUNT
python tests/gpu_report.py kill WORK_FOLDER FLAGS ...
python tests/gpu_report.py table WORK_FOLDER OUT_FOLDER DEVICE
"""

import json
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path
from signal import SIGKILL, SIGTERM
from statistics import median

import numpy as np


def write_tokens(folder, count):
    """A dataset of `count` ids of GPT-2's tokens to train on, and an eighth as many to validate. They
    are drawn, the same everywhere. As in text, small ids are frequent: by 1 / (id + 1)."""
    folder.mkdir(parents=True)
    random_state = np.random.RandomState(0)
    meta = {"vocab_size": 50257, "tokenizer": "gpt2", "dtype": "uint16"}
    meta |= {"source": "random numbers", "sha256": {}}
    for split, size in (("train", count), ("val", count // 8)):
        ids = (50257 ** random_state.random_sample(size) - 1).astype(np.uint16)
        (folder / f"{split}.bin").write_bytes(ids.tobytes())
        meta[f"{split}_tokens"] = size
        meta["sha256"][f"{split}.bin"] = sha256(ids.tobytes()).hexdigest()
    (folder / "meta.json").write_text(json.dumps(meta))


def kill_and_resume(work, flags):
    """Train in WORK/whole, and in WORK/killed with a SIGTERM and a SIGKILL, each after a checkpoint.
    Fails unless both end with the same hash of all state; hashes of other steps must differ."""
    names = ("whole", "killed")
    whole, killed = ([sys.executable, "train.py", *flags, f"--out_dir={work / n}"] for n in names)
    subprocess.run(whole, check=True)
    seen = 1  # the checkpoint of step 0
    for number, code in ((SIGTERM, 128 + SIGTERM), (SIGKILL, -SIGKILL)):
        process = subprocess.Popen(killed)
        while process.poll() is None and len(saved(work / "killed")) <= seen:
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait() == code, "it ended before the signal"
        seen = len(saved(work / "killed"))
    subprocess.run(killed, check=True)
    hashes, again = saved(work / "whole"), saved(work / "killed")
    assert len({*hashes.values()}) == len(hashes) > 1, "states of different steps have one hash"
    last = max(hashes)
    assert again[last] == hashes[last], f"step {last}: {again[last]}, else {hashes[last]}"


def rows_of(folder, name):
    """The rows of a kind, or the events of a name, in the log of a run; none without one."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in rows if name in (row["kind"], row.get("event"))]


def saved(folder):
    """{step: hash of the state that was saved last}"""
    return {event["step"]: event["sha256"] for event in rows_of(folder, "saved")}


def middle(folder, name):
    """The median of a column over the steps after the first third; NaN if it was not measured."""
    rows = rows_of(folder, "train")
    return median(float(row[name] or "nan") for row in rows[len(rows) // 3 :])


def speed(work):
    tokens, share = (middle(work / "gpt2", name) for name in ("tokens_per_sec", "mfu"))
    return f"{tokens:,.0f} tokens/s, MFU {share:.1%}".replace("nan%", "n/a")


def settings(work):
    config = json.loads((work / "gpt2" / "run.json").read_text())["config"]
    memory = max(row["mem_gb"] or 0 for row in rows_of(work / "gpt2", "train"))
    return f"{config['dtype']}, compile {str(config['compile']).lower()}, {memory:.1f} GB"


def hash_after_signals(work):
    last, digest = [*saved(work / "killed").items()][-1]
    checks = rows_of(work / "killed", "resume_checked")
    steps = ", ".join(f"{check['steps']} after {check['from']}" for check in checks)
    return f"the same at step {last} ({digest[:8]}); steps computed again: {steps}"


def tests_in_words(work):
    return (work / "tests.log").read_text().strip().splitlines()[-1].strip("= ")


def price_of_determinism(work):
    exact, loose = (middle(work / name, "step_ms") for name in ("gpt2", "gpt2_loose"))
    return f"{exact / loose - 1:.1%}"


NUMBERS = {  # name: (function of the work folder, the parts that it needs, goal)
    "SHA-256 of all state after SIGTERM and SIGKILL": (hash_after_signals, ["killed"], "the same"),
    "tests of correctness": (tests_in_words, ["tests"], "none failed"),
    "GPT-2 124M": (speed, ["gpt2"], "55%"),
    "its dtype, compilation, memory": (settings, ["gpt2"], ""),
    "price of deterministic mode": (price_of_determinism, ["gpt2", "gpt2_loose"], "under 15%"),
    "config/shakespeare.py: validation loss": (
        lambda work: f"{rows_of(work / 'shakespeare', 'eval')[-1]['val_loss']:.4f}",
        ["shakespeare"],
        "",
    ),
}


def table(work, out, device):
    """Print how the parts ended and what was measured; write it to results.json and results.md."""
    lines = [line.split("\t") for line in (work / "parts.tsv").read_text().splitlines()]
    parts = {name: {"exit_code": int(code), "seconds": int(took)} for name, code, took in lines}
    facts = {"machine": {}, "parts": parts, "measured": {}}
    for path in sorted(work.glob("*/run.json"))[:1]:
        facts["machine"] = json.loads(path.read_text())["run"]
    rows = [("what", "measured", "goal"), ("---", "---", "---")]
    if device == "cpu":
        rows.append(("**toy sizes on a CPU**", "no figure below says anything about a GPU", ""))
    rows += [(name, value, "") for name, value in facts["machine"].items()]
    for name, part in parts.items():
        rows.append((f"part {name}", f"exit code {part['exit_code']}, {part['seconds']} s", ""))
    for name, (measure, needed, goal) in NUMBERS.items():
        if all(parts.get(part, {}).get("exit_code") == 0 for part in needed):
            facts["measured"][name] = measure(work)
            rows.append((name, facts["measured"][name], goal))
    text = "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(facts, indent=1) + "\n")
    (out / "results.md").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    command, folder, *rest = sys.argv[1:]
    if command == "tokens":
        write_tokens(Path(folder), int(rest[0]))
    elif command == "kill":
        kill_and_resume(Path(folder), rest)
    else:
        table(Path(folder), Path(rest[0]), rest[1])
