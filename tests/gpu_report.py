"""For tests/gpu.sh: generates the tokens that it trains on, and tabulates what it measured.

python tests/gpu_report.py tokens FOLDER VOCAB_SIZE COUNT
python tests/gpu_report.py kill WORK_FOLDER FLAGS ...
python tests/gpu_report.py table WORK_FOLDER OUT_FOLDER DEVICE
"""

import json
import re
import subprocess
import sys
import time
from hashlib import sha256
from pathlib import Path
from statistics import median

import numpy as np

RUNS = ("whole", "killed")


def write_tokens(folder, vocab_size, count):
    """A dataset of `count` generated ids to train on and an eighth as many to validate. As in text,
    small ids are frequent: about in proportion to 1 / (id + 1). The same bits everywhere."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    random_state = np.random.RandomState(0)
    meta = {"vocab_size": vocab_size, "dtype": "uint16", "sha256": {}}
    for split, size in (("train", count), ("val", count // 8)):
        ids = (vocab_size ** random_state.random_sample(size) - 1).astype(np.uint16)
        (folder / f"{split}.bin").write_bytes(ids.tobytes())
        meta[f"{split}_tokens"] = size
        meta["sha256"][f"{split}.bin"] = sha256(ids.tobytes()).hexdigest()
    meta["source"] = "generated"
    (folder / "meta.json").write_text(json.dumps(meta))


def kill_and_resume(work, flags):
    """Train in WORK/whole, and in WORK/killed with a SIGKILL behind the first checkpoint. Fails
    unless both end with the same hash of all state; hashes of other steps must differ."""
    whole, killed = ([sys.executable, "train.py", *flags, f"--out_dir={work / n}"] for n in RUNS)
    subprocess.run(whole, check=True)
    process = subprocess.Popen(killed)
    while process.poll() is None and not any((work / "killed").glob("ckpt_*[1-9]*.pt")):
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -9, "it ended before it could be killed"
    subprocess.run(killed, check=True)
    hashes, again = (dict(saved(work / name)) for name in RUNS)
    assert len(set(hashes.values())) == len(hashes) > 1, "states of different steps have one hash"
    last = max(hashes)
    assert again[last] == hashes[last], (
        f"step {last}: {again[last]}, without the kill {hashes[last]}"
    )


def saved(folder):
    return [(e["step"], e["sha256"]) for e in rows_of(folder, "event") if e["event"] == "saved"]


def rows_of(folder, kind):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == kind]


def middle(folder, name):
    """The median of a column over the steps after the first third. None: it was not measured."""
    rows = rows_of(folder, "train")
    values = [row[name] for row in rows[len(rows) // 3 :]]
    return None if None in values else median(values)


def nanogpt_ms(log):
    """nanoGPT's own time per iteration: the median of those after the first third."""
    times = [float(ms) for ms in re.findall(r"^iter \d+: .*time ([\d.]+)ms", log.read_text(), re.M)]
    return median(times[len(times) // 3 :])


def validation_loss(work):
    return f"{rows_of(work / 'shakespeare', 'eval')[-1]['val_loss']:.4f}"


def mfu(work):
    tokens, share = (middle(work / "gpt2", name) for name in ("tokens_per_sec", "mfu"))
    return f"{tokens:,.0f} tokens/s, MFU " + ("n/a" if share is None else f"{share:.1%}")


def settings(work):
    """Of the run behind the figures of speed; the highest memory of a step."""
    config = json.loads((work / "gpt2" / "run.json").read_text())["config"]
    memory = max(row["mem_gb"] or 0 for row in rows_of(work / "gpt2", "train"))
    return f"{config['dtype']}, compile {str(config['compile']).lower()}, {memory:.1f} GB"


def hash_after_sigkill(work):
    step, sha = saved(work / "killed")[-1]
    events = {row["event"]: row for row in rows_of(work / "killed", "event")}
    again = events.get("resume_checked", {"equal": 0, "compared": 0})
    at = (
        f"resumed at {events['resume']['step']}, {again['equal']} of {again['compared']} rows equal"
    )
    return f"the same at step {step} ({sha[:8]}); {at}"


def tests_in_words(work):
    return (work / "tests.log").read_text().strip().splitlines()[-1].strip("= ")


def price_of_determinism(work):
    exact, loose = (middle(work / name, "step_ms") for name in ("gpt2", "gpt2_loose"))
    return f"{exact / loose - 1:.1%}"


def over_nanogpt(work):
    return f"{nanogpt_ms(work / 'nanogpt.log') / middle(work / 'gpt2', 'step_ms'):.2f}"


def one_layer_over_nanogpt(work):
    ours = middle(work / "shakespeare", "step_ms")
    return f"{nanogpt_ms(work / 'nanogpt_one_layer.log') / ours:.2f}"


NUMBERS = {  # name: (function of the work folder, the parts that it needs, goal)
    "config/shakespeare.py: validation loss": (validation_loss, ["shakespeare"], ""),
    "tests of correctness": (tests_in_words, ["tests"], "none failed"),
    "SHA-256 of all state after SIGKILL": (hash_after_sigkill, ["killed"], "the same"),
    "GPT-2 124M": (mfu, ["gpt2"], "55%"),
    "its dtype, compilation, memory": (settings, ["gpt2"], ""),
    "price of deterministic mode": (price_of_determinism, ["gpt2", "gpt2_loose"], "under 15%"),
    "tokens/s over nanoGPT's": (over_nanogpt, ["gpt2", "nanogpt"], "1.3"),
    "steps/s over nanoGPT's, one layer": (
        one_layer_over_nanogpt,
        ["shakespeare", "nanogpt_one_layer"],
        "5",
    ),
}


def machine(work):
    """What the first run.json found says of the machine."""
    found = json.loads(next(work.glob("*/run.json")).read_text())
    hardware, versions = found["hardware"], found["versions"]
    return {
        "device": hardware["device"],
        "driver": hardware["driver"],
        "Python": versions["python"],
        "torch": versions["torch"],
        "CUDA": versions["cuda"],
        "commit": found["git"]["commit"],
    }


def table(work, out, device):
    """Print how the parts ended and what was measured; write it to results.json and results.md."""
    lines = [line.split("\t") for line in (work / "parts.tsv").read_text().splitlines()]
    parts = {name: {"exit_code": int(code), "seconds": int(took)} for name, code, took in lines}
    facts = {"machine": {}, "parts": parts, "measured": {}}
    if any(work.glob("*/run.json")):
        facts["machine"] = machine(work)
    rows = [("what", "measured", "goal"), ("---", "---", "---")]
    if device == "cpu":
        rows.append(("**toy sizes on a CPU**", "no figure below says anything about a GPU", ""))
    rows += [(name, value, "") for name, value in facts["machine"].items()]
    for name, part in parts.items():
        rows.append((f"part {name}", f"exit code {part['exit_code']}, {part['seconds']} s", ""))
    for name, (measure, needed, goal) in NUMBERS.items():
        if all(part in parts and parts[part]["exit_code"] == 0 for part in needed):
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
        write_tokens(folder, *map(int, rest))
    elif command == "kill":
        kill_and_resume(Path(folder), rest)
    else:
        table(Path(folder), Path(rest[0]), rest[1])
