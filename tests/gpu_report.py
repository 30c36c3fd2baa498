"""For tests/gpu.sh: generates the tokens that it trains on, and tabulates what it measured.

python tests/gpu_report.py tokens FOLDER VOCAB_SIZE COUNT
python tests/gpu_report.py table WORK_FOLDER OUT_FOLDER DEVICE
"""

import json
import re
import sys
import xml.etree.ElementTree
from hashlib import sha256
from pathlib import Path
from statistics import median

import numpy as np

GOALS = {
    "MFU at GPT-2 124M": "55%",
    "price of deterministic mode": "under 15%",
    "tokens/s over nanoGPT's": "1.3",
    "steps/s over nanoGPT's, one layer": "5",
}


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


# ---- what the parts left -------------------------------------------------------------------------


def of_tests(path):
    """{what: value} from a JUnit file: the outcomes of the tests, and what they recorded."""
    cases = list(xml.etree.ElementTree.parse(path).iter("testcase"))
    ends = {tag: [c for c in cases if c.find(tag) is not None] for tag in ("failure", "error")}
    failed = [case.get("name") for case in ends["failure"] + ends["error"]]
    skipped = [
        case.find("skipped").get("message") for case in cases if case.find("skipped") is not None
    ]
    name = path.stem
    found = {f"{name}: passed": len(cases) - len(failed) - len(skipped)}
    found[f"{name}: failed"] = ", ".join(failed) or 0
    for reason in dict.fromkeys(skipped):
        found[f"{name}: skipped, {reason}"] = skipped.count(reason)
    properties = [each for case in cases for each in case.iter("property")]
    return found | {each.get("name"): each.get("value") for each in properties}


def of_run(folder):
    """(facts, medians over the steps after the first third, last evaluation) of a run.
    facts["how"]: "compiled" or "eager"."""
    facts = json.loads((folder / "run.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    facts["how"] = "compiled" if facts["run"]["compile"] else "eager"
    steps = [row for row in rows if row["kind"] == "train"]
    steps = steps[len(steps) // 3 :]
    keys = ("step_ms", "tokens_per_sec", "mfu", "mem_gb")
    middle = {k: median(r[k] for r in steps) if steps[0][k] is not None else None for k in keys}
    return facts, middle, [row for row in rows if row["kind"] == "eval"][-1]


def of_shakespeare(work):
    facts, row, evaluation = of_run(work / "shakespeare")
    name = facts["data"]["name"]
    return {
        f"config/shakespeare.py on {name}: validation loss": round(evaluation["val_loss"], 4),
        f"config/shakespeare.py on {name}: ended": facts["ended"],
        f"config/shakespeare.py on {name}: seconds, all": round(sum(facts["seconds"].values()), 1),
        f"steps/s, one layer ({facts['how']})": round(1000 / row["step_ms"], 1),
    }


def of_gpt2(work):
    facts, row, _ = of_run(work / "gpt2")
    return {
        f"tokens/s at GPT-2 124M ({facts['how']})": round(row["tokens_per_sec"]),
        f"MFU at GPT-2 124M ({facts['how']})": row["mfu"] and f"{row['mfu']:.1%}",
        "memory at GPT-2 124M, GB": round(row["mem_gb"], 1),
        "precision at GPT-2 124M": facts["run"]["dtype"],
    }


def of_loose(work):
    (facts, exact, _), (loose_facts, loose, _) = map(of_run, (work / "gpt2", work / "gpt2_loose"))
    how = " / ".join(dict.fromkeys((facts["how"], loose_facts["how"])))
    price = exact["step_ms"] / loose["step_ms"] - 1
    return {f"price of deterministic mode ({how})": f"{price:.1%}"}


def nanogpt_ms(log):
    """nanoGPT's own time per iteration: the median of those after the first third."""
    times = [float(ms) for ms in re.findall(r"^iter \d+: .*time ([\d.]+)ms", log.read_text(), re.M)]
    return median(times[len(times) // 3 :])


def nanogpt_how(log):
    return "compiled" if "compiling the model" in log.read_text() else "eager"


def of_nanogpt(work):
    facts, row, _ = of_run(work / "gpt2")
    how = nanogpt_how(work / "nanogpt.log")
    ratio = nanogpt_ms(work / "nanogpt.log") / row["step_ms"]
    tokens = row["tokens_per_sec"] / ratio
    return {
        f"nanoGPT's tokens/s at GPT-2 124M ({how})": round(tokens),
        f"tokens/s over nanoGPT's ({facts['how']} / {how})": f"{ratio:.2f}",
    }


def of_nanogpt_one_layer(work):
    ms, how = (read(work / "nanogpt_one_layer.log") for read in (nanogpt_ms, nanogpt_how))
    facts, row, _ = of_run(work / "shakespeare")
    both = f"({facts['how']} / {how})"
    return {
        f"nanoGPT's steps/s, one layer ({how})": round(1000 / ms, 1),
        f"steps/s over nanoGPT's, one layer {both}": f"{ms / row['step_ms']:.2f}",
    }


def of_ladder(work):
    ladder = json.loads((work / "ladder" / "bench.json").read_text())["ladder"]
    how, found = "eager", {}
    for name, rung in ladder["rungs"].items():
        if name == "compile":
            how = "compiled"  # and so are the rungs on top of it
        found[f"ladder, one layer: {name} ({how})"] = f"{rung['ms']:.3f} ms"
    return found


PARTS = {
    "tests": lambda work: of_tests(work / "tests.xml"),
    "distributed": lambda work: of_tests(work / "distributed.xml"),
    "shakespeare": of_shakespeare,
    "gpt2": of_gpt2,
    "gpt2_loose": of_loose,
    "nanogpt": of_nanogpt,
    "nanogpt_one_layer": of_nanogpt_one_layer,
    "ladder": of_ladder,
}


# ---- the table -----------------------------------------------------------------------------------


def machine(work):
    """What the first run.json found says of the machine."""
    found = json.loads(next(work.glob("*/run.json")).read_text())
    hardware, versions = found["hardware"], found["versions"]
    return {
        "device": hardware["device"],
        "GPUs": hardware["gpu_count"],
        "driver": hardware["driver"],
        "torch": versions["torch"],
        "CUDA": versions["cuda"],
        "commit": found["git"]["commit"],
        "changed since": found["git"]["dirty"],
    }


def table(work, out, device):
    """Print the results of the parts, and write them to results.json and results.md."""
    facts = {"machine": {}, "parts": {}, "measured": {}}
    if any(work.glob("*/run.json")):
        facts["machine"] = machine(work)
    for line in (work / "parts.tsv").read_text().splitlines():
        name, code, seconds = line.split("\t")
        facts["parts"][name] = {"exit_code": int(code), "seconds": int(seconds)}
        try:
            facts["measured"] |= PARTS[name](work)
        except Exception as error:  # a part may have left nothing; its row says so
            facts["measured"][name] = f"not measured ({type(error).__name__}: {error})"
    ends = {
        name: "passed" if not p["exit_code"] else f"exit code {p['exit_code']}"
        for name, p in facts["parts"].items()
    }
    rows = [("what", "measured", "goal"), ("---", "---", "---")]
    if device == "cpu":
        rows += [("**toy sizes on a CPU**", "no figure below says anything about a GPU", "")]
    rows += [(name, value, "") for name, value in facts["machine"].items()]
    rows += [(f"part {n}", f"{ends[n]}, {p['seconds']} s", "") for n, p in facts["parts"].items()]
    goals = {name: GOALS.get(name.partition(" (")[0], "") for name in facts["measured"]}
    rows += [(name, value, goals[name]) for name, value in facts["measured"].items()]
    text = "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(facts, indent=1) + "\n")
    (out / "results.md").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    command, first, second, third = sys.argv[1:]
    if command == "tokens":
        write_tokens(first, int(second), int(third))
    else:
        table(Path(first), Path(second), third)
