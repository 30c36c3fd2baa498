"""sample.py, replay.py, bench.py and the examples, on small runs."""

import dataclasses
import hashlib
import json
import math
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import sources
import torch
from conftest import (
    REPO,
    arguments,
    flip_a_bit,
    make_dataset,
    processes,
    pydoc_text,
    start,
    wait_for,
    wait_until_gone,
)
from sources import at_step, loading, stop_at

import bench
import sample
from prepare_data import tokenizer_of

SAVES = ("--save_interval=4", "--eval_interval=6")
AVERAGED = ("--ema_decay=0.9", "--dropout=0.1")
NGRAM = REPO / "examples/ngram.py"


@pytest.fixture
def tool(run_train, data_dir):
    """tool(name, *words, before="", code=0) -> Done: python NAME.py WORDS, in a process; bench.py
    with a small model."""

    def run(name, *words, before="", code=0):
        fixed = arguments("run", data_dir, ["--timing_seconds=0.01", "--rounds=3"])
        words = [*(fixed if name == "bench" else ()), *map(str, words)]
        call = f"{before}\nimport {name}\nraise SystemExit({name}.main({words!r}))"
        return run_train("unused", before=call, code=code)

    return run


@pytest.fixture
def run_script(run_train, tmp_path):
    """run_script(out_dir, source, *flags, ...) -> Done: the run of a script, lab.py in tmp_path."""

    def run(out_dir, source, *flags, before="", **how):
        (tmp_path / "lab.py").write_text(source)
        return run_train(out_dir, *flags, before=loading(tmp_path / "lab.py") + before, **how)

    return run


def kill_at(step):
    return stop_at(step, "SIGKILL")


# ---- sample.py -----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def trained(train_in, tmp_path_factory):
    """A run of 12 steps with averaged weights; best.pt is of step 12."""
    flags = (*SAVES, "--ema_decay=0.5", "--dropout=0.1", "--peak_lr=1e-2", "--n_layer=2")
    return train_in(tmp_path_factory.mktemp("sample"), "run", *flags)


WITHOUT_CACHE = """
import model

def forward(self, tokens, last_only=False, inner=model.GPT.forward):  # which takes no cache
    return inner(self, tokens, last_only=last_only)

model.GPT.forward = forward
"""


def test_the_text_is_the_same_with_and_without_the_cache(trained, tool, tmp_path):
    saved = torch.load(trained.out_dir / "best.pt", weights_only=True)
    generator = torch.Generator().manual_seed(1)
    for name in saved["ema"]:  # so that the text depends on each token before
        saved["ema"][name].normal_(generator=generator)
    torch.save(saved, tmp_path / "wild.pt")
    flags = ("--start=The ", "--max_new_tokens=30", "--num_samples=2")
    cached = tool("sample", tmp_path / "wild.pt", *flags)
    plain = tool("sample", tmp_path / "wild.pt", *flags, before=WITHOUT_CACHE)
    assert cached.stdout == plain.stdout and cached.stdout.startswith("The ")
    assert len(cached.stdout.split(sample.LINE)) == 2
    other = tool("sample", tmp_path / "wild.pt", *flags, "--seed=2")
    assert other.stdout != cached.stdout, "the control"


FRONT_SPACES = """
import prepare_data

class Front:  # as SentencePiece: a piece begins with a space, which a text's first one loses
    vocab_size = 57
    def __init__(self, meta): pass
    def encode(self, text): return [int(word[1:]) for word in text.split()]
    def decode(self, ids): return "".join(f" w{i}" for i in ids)[1:]

prepare_data.TOKENIZERS["front"] = Front
"""


def test_a_tokenizer_with_spaces_at_the_front_keeps_them(trained, tool, tmp_path):
    saved = torch.load(trained.out_dir / "best.pt", weights_only=True)
    saved["data"]["meta"]["tokenizer"] = "front"
    torch.save(saved, tmp_path / "front.pt")
    flags = ("--start=w7 w8", "--max_new_tokens=5", "--num_samples=2")
    done = tool("sample", tmp_path / "front.pt", *flags, before=FRONT_SPACES)
    for text in done.stdout.removesuffix("\n").split(sample.LINE):
        assert re.fullmatch(r"w7 w8( w\d+){5}", text), text


def test_what_is_added_is_whole_text_up_to_the_first_end():
    tokenizer, prompt, ids = (
        tokenizer_of({"tokenizer": "byte"}),
        [*"Käse: ".encode()],
        [*"3 € ".encode()],
    )
    assert sample.text_after(prompt, ids, -1, tokenizer) == "3 € "
    assert sample.text_after(prompt, ids, ord(" "), tokenizer) == "3"
    assert sample.text_after(prompt, ids[:3], -1, tokenizer) == "3 \ufffd", "which is not shown yet"


def test_an_export_has_the_averages_and_the_same_hash_each_time(trained, tool, tmp_path):
    from safetensors import safe_open

    hashes = set()
    for name in ("a", "b", "c"):
        path = tmp_path / f"{name}.safetensors"
        tool("sample", trained.out_dir, f"--export={path}")
        hashes.add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert len(hashes) == 1
    saved = torch.load(trained.out_dir / "best.pt", weights_only=True)
    with safe_open(path, "pt") as file:
        assert file.metadata()["n_layer"] == "2"
        assert {*file.keys()} == {*saved["model"]}
        for name, average in saved["ema"].items():
            assert torch.equal(file.get_tensor(name), average)
            assert not torch.equal(average, saved["model"][name]), "the control"


def test_tied_weights_both_get_their_average():
    from plumbing import evaluated_weights

    weight = torch.ones(3)
    model = {"in": weight, "out": weight.clone(), "buffer": torch.zeros(2)}
    found = evaluated_weights({"model": model, "ema": {"in": 2 * weight}})
    assert [found[name].sum().item() for name in ("in", "out", "buffer")] == [6, 6, 0]


def test_a_scripts_run_is_not_sampled_without_the_script(run_script, tool):
    done = run_script("run", NGRAM.read_text().replace("__file__", repr(str(NGRAM))), *SAVES)
    assert "embedding.ngram.weight" in torch.load(done.checkpoint(12))["model"]
    path = done.out_dir.parent / "lab.py"
    for place in (done.out_dir, done.out_dir / "best.pt"):
        tool("sample", place, code=2).is_one_line("is a run of lab.py", "add --script=PATH/lab.py")
    by_flag = tool("sample", done.out_dir, path, "--max_new_tokens=40")
    by_word = tool("sample", path, done.out_dir, "--max_new_tokens=40")
    assert by_flag.stdout == by_word.stdout and len(by_flag.stdout) == 41


def test_best_gives_way_where_it_is_damaged_or_untrained(trained, tool, tmp_path, run_train):
    folder = shutil.copytree(trained.out_dir, tmp_path / "copy")
    path = folder / "best.pt"
    flip_a_bit(path)
    done = tool("sample", folder, "--max_new_tokens=5")
    assert re.search(r"ckpt_00000012.pt, step 12; \S+/best.pt is damaged", done.stderr)
    tool("sample", path, code=2).is_one_line("best.pt is damaged")
    early = run_train("early", before=stop_at(7), code=143)
    done = tool("sample", early.out_dir, "--max_new_tokens=5")
    assert "ckpt_00000007.pt, step 7\n" in done.stderr


BAD_INPUT = """
sample                              python sample.py out/NAME
sample /nowhere                     no checkpoint in
sample RUN --temperature=-1         --temperature=-1
sample RUN --num_samples=0          --num_samples=0
sample RUN --start=FILE:/nowhere    cannot read /nowhere
sample RUN --start=€                the vocabulary lacks
sample RUN/run.json                 no checkpoint
sample RUN --export=/no/w           --export=/no/w cannot be written
replay RUN                          expected RUN --step=N
replay RUN --step=3 --verify=true   expected RUN --step=N
replay / --step=3                   holds no run
replay RUN --step=99                --step=99
bench --only=laddr                  no part 'laddr'
bench --only=memory --n_heads=3     did you mean n_head?
"""


@pytest.mark.parametrize("line", BAD_INPUT.strip().splitlines())
def test_bad_input_of_a_tool_is_one_line(trained, tool, line):
    command, expected = re.split("   +", line)
    name, *words = command.replace("RUN", str(trained.out_dir)).split()
    tool(name, *words, code=2).is_one_line(expected)


# ---- replay.py -----------------------------------------------------------------------------------


def rewrite(done, change):
    """Replace each row of metrics.jsonl by change(row), or drop it where that is None."""
    path = done.out_dir / "metrics.jsonl"
    rows = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows if row))


def edited(step, kind, change):
    """A change of one row, for rewrite()."""

    def apply(row):
        is_it = row["step"] == step and kind in (row["kind"], row.get("event"))
        return change(row) if is_it else row

    return apply


def scaled(name):
    """A change: the smallest one of a number."""
    return lambda row: row | {name: row[name] * (1 + 2**-52)}


@pytest.fixture
def good(once, tmp_path):
    """A copy of a finished run, to be forged."""
    done = once(*SAVES, *AVERAGED)
    shutil.copytree(done.out_dir, tmp_path / "run")
    return dataclasses.replace(done, out_dir=tmp_path / "run")


FORGERIES = {
    "loss": (edited(7, "train", scaled("loss")), "step 7: loss"),
    "lr": (edited(2, "train", scaled("lr")), "step 2: lr"),
    "val_loss": (edited(6, "eval", scaled("val_loss")), "step 6: val_loss"),
    "best": (edited(12, "eval", scaled("best_val_loss")), "step 12: best_val_loss"),
    "a row less": (edited(5, "train", lambda row: None), "step 5: no such row"),
    "the last step": (edited(12, "train", lambda row: None), "step 11: no such row"),
    "a skip": (edited(3, "train", lambda row: row | {"skipped": 1}), "step 3: skipped 1 -> 0"),
}


def test_a_good_log_is_verified_and_nothing_is_written(good, tool):
    before = {path: path.read_bytes() for path in good.out_dir.rglob("*") if path.is_file()}
    done = tool("replay", good.out_dir, "--verify=true")
    assert "all numbers are those of the log" in done.stdout and not done.stderr
    assert before == {path: path.read_bytes() for path in good.out_dir.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_log_is_found_and_named(good, tool, name):
    change, words = FORGERIES[name]
    rewrite(good, change)
    assert words in tool("replay", good.out_dir, "--verify=true", code=1).stdout


def test_a_run_that_was_killed_twice_and_stopped_is_verified(run_train, tool):
    flags = (*SAVES, "--dropout=0.1", "--optimizer=muon", "--num_workers=1")
    run_train("run", *flags, before=stop_at(6), code=143)  # where an evaluation is due
    run_train("run", *flags, before=kill_at(7), code=137)
    done = run_train("run", *flags, before=kill_at(11), code=137)
    assert "all numbers" in tool("replay", done.out_dir, "--verify=true").stdout, "not finished"
    done = run_train("run", *flags)
    assert len(done.events("resume")) == 3
    assert "all numbers" in tool("replay", done.out_dir, "--verify=true").stdout
    rewrite(done, edited(11, "train", scaled("loss")))
    assert "step 11: loss" in tool("replay", done.out_dir, "--verify=true", code=1).stdout


@pytest.mark.parametrize("step, kill", [(7, False), (7, True), (10, True)])
def test_a_forced_rate_is_followed(run_train, tool, step, kill):
    """From the evaluation of step 6, which a killed run goes on after, or from the stop."""
    flags = (*SAVES, "--peak_lr=1e-2")
    how = {"before": kill_at(step), "code": 137} if kill else {"before": stop_at(step), "code": 143}
    run_train("run", *flags, **how)
    done = run_train("run", *flags, "--peak_lr=3e-2", "--max_steps=16", "--resume=force")
    (event,) = done.events("resume")
    assert event["changed"]["peak_lr"] == [1e-2, 3e-2]
    found = tool("replay", done.out_dir, "--verify=true").stdout
    found += tool("replay", done.out_dir, done.out_dir).stdout
    assert "all numbers" in found and found.count("peak_lr 0.01 -> 0.03") == 2
    wrong = event["changed"] | {"peak_lr": [2e-2, 3e-2]}
    rewrite(done, edited(event["step"], "resume", lambda row: row | {"changed": wrong}))
    assert "step 1: lr" in tool("replay", done.out_dir, "--verify=true", code=1).stdout


def test_a_longer_run_and_an_average_that_was_stopped_are_verified(run_train, tool):
    flags = (*SAVES, "--ema_decay=0.9", "--plateau_factor=0.5", "--plateau_patience=1")
    run_train("run", *flags)
    done = run_train("run", *flags, "--max_steps=18", "--decay_steps=12")
    assert done.facts["config"]["max_steps"] == 18
    assert "all numbers" in tool("replay", done.out_dir, "--verify=true").stdout


def test_a_script_with_a_knob_is_verified_with_the_script(run_script, tool):
    flags = (*SAVES, "--alpha=0.3")
    run_script("run", sources.KNOB, *flags, before=kill_at(7), code=137)
    done = run_script("run", sources.KNOB, *flags)
    tool("replay", done.out_dir, "--verify=true", code=2).is_one_line("is a run of lab.py")
    script = done.out_dir.parent / "lab.py"
    assert "all numbers" in tool("replay", done.out_dir, "--verify=true", script).stdout
    assert "all numbers" in tool("replay", done.out_dir, "--step=9", f"--script={script}").stdout


def test_rows_of_another_kind_are_no_steps(run_script, tool):
    row = '{"kind": "probe", "step": row["step"]}'
    look = f'lambda run, row: row["kind"] == "eval" and run.folder.write_row({row})'
    script = f"import train\ntrain.on_row.append({look})\n"
    done = run_script("run", script + "if __name__ == '__main__':\n    train.main()\n", *SAVES)
    found = tool("replay", done.out_dir, "--verify=true", done.out_dir.parent / "lab.py").stdout
    assert len(done.rows("probe")) > 2 and "all numbers" in found and " 12/12 " in found


def test_what_else_has_changed_is_said_on_another_machine(good, tool, tmp_path):
    path = good.out_dir / "run.json"
    facts = json.loads(path.read_text())
    data_dir = facts["config"]["data_dir"]
    facts["config"]["data_dir"] = "/nowhere/data"
    facts["run"] |= {"device": "Another CPU", "torch": "1.0"}
    path.write_text(json.dumps(facts))
    done = tool("replay", good.out_dir, "--verify=true", f"--data_dir={data_dir}")
    assert "all numbers" in done.stdout
    assert "torch 1.0 -> " in done.stdout and "device Another CPU -> " in done.stdout
    assert not Path("/nowhere").exists()
    other = make_dataset(tmp_path / "other", "small", pydoc_text()[3000:6000])
    refused = tool("replay", good.out_dir, "--step=2", f"--data_dir={other}", code=2)
    assert f"its data is not in {other}; type --data_dir=FOLDER" in refused.stderr


def test_a_step_shows_numbers_weights_and_text(good, once, tool):
    done = tool("replay", good.out_dir, "--step=9")
    row = next(row for row in good.rows("train") if row["step"] == 9)
    for name in ("loss", "grad_norm", "lr"):
        assert f"{name} {row[name]} in the log, {row[name]} computed" in done.stdout
    dense = once(*SAVES, *AVERAGED, "--save_interval=1", "--keep_last=20")
    before, after = (torch.load(dense.checkpoint(at))["model"]["head.weight"] for at in (8, 9))
    (line,) = [line for line in done.stdout.splitlines() if line.endswith(" head.weight")]
    gradient, weight, update = map(float, line.split()[:3])
    assert 0 < gradient <= min(1, row["grad_norm"]), "clipped"
    assert weight == pytest.approx(after.norm().item(), rel=1e-3)
    assert update == pytest.approx((after - before).norm().item(), rel=1e-3)
    text = Path(good.facts["config"]["data_dir"], "small.txt").read_text()
    lines = [line for line in done.stdout.splitlines() if line[:1] in "'\""]
    assert len(lines) == 8 and all(eval(line) in text for line in lines)
    assert "ckpt" not in done.stdout and "eval" not in done.stdout, "the way there is silent"
    rewrite(good, edited(9, "train", scaled("loss")))
    assert "step 9: loss" in tool("replay", good.out_dir, "--step=9", code=1).stdout
    later = tool("replay", good.out_dir, "--step=10", code=1).stdout  # shown, as on another CPU
    assert "step 9: loss" in later and " head.weight" in later


def test_a_step_that_ended_a_run_can_be_seen(run_train, tool):
    broken = at_step(1, "run.model.head.weight.data.fill_(float('nan'))")
    done = run_train("run", *SAVES, before=broken, code=1)
    assert "--step=10" in done.stderr
    shown = tool("replay", done.out_dir, "--step=10", before=broken, code=None).stdout
    assert "gradient      weight      update" in shown and " nan " in shown


def test_two_logs(good, once, run_train, tool, tmp_path):
    same = shutil.copytree(good.out_dir, tmp_path / "same")
    assert "equal up to step 12" in tool("replay", good.out_dir, same).stdout
    other = once(*SAVES, *AVERAGED, "--beta2=0.9")
    found = tool("replay", good.out_dir, other.out_dir, code=1).stdout
    assert "beta2 0.95 -> 0.9" in found and "the logs part at step 3: loss" in found
    short = run_train("short", *SAVES, *AVERAGED, before=kill_at(7), code=137)
    found = tool("replay", good.out_dir, short.out_dir, code=125).stdout
    assert "equal up to step 6; they end at 12, 6" in found


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGKILL"])
@pytest.mark.parametrize(
    "words", ["replay.py {run} --verify=true", "bench.py --only=workers {flags}"]
)
def test_a_tool_that_is_killed_leaves_no_process(words, name, trained, tmp_path, data_dir):
    flags = f"--dataset=small --data_dir={data_dir} --device=cpu --max_steps=9 --timing_seconds=9"
    tool, *rest = words.format(run=trained.out_dir, flags=flags).split()
    process = start([sys.executable, REPO / tool, *rest], tmp_path / "log")
    mark = process.mark
    count = 1 if tool == "replay.py" else 2
    wait_for(lambda: len(processes(mark=mark)) >= count or process.poll() is not None)
    os.kill(process.pid, signal.Signals[name])
    process.wait(60)
    wait_until_gone(mark=mark)


# ---- bench.py ------------------------------------------------------------------------------------


def test_each_part_is_measured_and_the_folder_is_left_alone(tool, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "run.json").write_text("not to be touched")
    (run / "ckpt_00000005.pt").write_text("not to be touched")
    parts = "--only=profile,memory,workers,overhead"
    done = tool("bench", parts, f"--out_dir={run}")
    number = r"(\d[\d.,%]* ± [\d.,%]+|n/a)"
    for name in ("forward", "backward", "optimizer", "data", "idle"):
        assert re.search(rf"(?m)^  {name} +{number}$", done.stdout), name
    for name in ("1 workers", "train.py"):
        assert re.search(rf"(?m)^  {name} +{number} +{number}$", done.stdout), name
    assert re.search(r"aten::mm +[\d.]+%", done.stdout), "torch's own table"
    assert {path.name for path in run.iterdir()} == {"run.json", "ckpt_00000005.pt"}


def test_the_ladder_has_its_rungs(tool):
    flags = ("--only=ladder", "--dtype=bfloat16", "--optimizer=muon")
    without_compiler = "import plumbing\nplumbing.choose_compile = lambda *_: (False, '')"
    found = tool("bench", *flags, before=without_compiler).stdout
    rungs = re.findall(r"(?m)^  (\w[\w, .]+?)  ", found)
    assert len(rungs) == 4 and "bfloat16" in rungs[2] and rungs[3] == "not deterministic"


def test_memory_is_predicted_within_5_percent(tool):
    found = tool("bench", "--only=memory", "--batch_size=64").stdout
    (once,) = re.findall(r"(?m)^  64 sequences +([\d.]+)$", found)
    ((predicted, measured),) = re.findall(r"(?m)^  128 sequences +([\d.]+) +([\d.]+)$", found)
    assert float(predicted) == pytest.approx(float(measured), rel=0.05)
    assert float(measured) > 1.5 * float(once), "the control"
    assert re.search(r"room for a micro-batch of [\d,]{4,}$", found, re.MULTILINE)


def test_rounds_that_disagree_are_no_figure():
    assert bench.figure([1.0, 2.0, 2.0, 2.1, 9.0], ".1f") == "2.0 ± 0.1", "without the extremes"
    assert bench.figure([1.0, 1.0, 2.0, 3.0, 9.0], ".1f") == "n/a"
    assert bench.figure([1.0, math.nan], ".1f") == "n/a"
    assert bench.figure([0.001, 0.003], ".1%", least=0.05) == "0.2% ± 0.1%"
    assert bench.figure([2.0], ".1f", 2.0) == "1.0 ± 0.0"


def test_the_model_of_a_script_is_measured(tool, tmp_path):
    path = tmp_path / "bigram.py"
    path.write_text(
        "import torch, train\nfrom model import cross_entropy\n"
        "class Bigram(torch.nn.Embedding):\n"
        "    def forward(self, inputs, targets=None):\n"
        "        logits = super().forward(inputs)\n"
        "        return logits if targets is None else cross_entropy(logits, targets)\n"
        "train.build_model = lambda knobs, size: Bigram(500, 500)\n"
        f"{sources.END}"
    )
    found = tool("bench", path, "--only=memory,overhead").stdout
    (once,) = re.findall(r"(?m)^  8 sequences +([\d.]+)$", found)
    assert 4.0 <= float(once) <= 6.0, "1 MB of weights, 2 of moments, 1 of gradients, logits"
    assert "overhead: n/a" in found


# ---- examples ------------------------------------------------------------------------------------

FAST = "config/shakespeare_fast.py"


def test_the_knobs_of_the_example_are_refused_with_what_to_type(python_train):
    done = python_train("run", str(REPO / FAST), code=2)
    assert "ngram_rows" in done.output and "examples/ngram.py" in done.output


def test_ngram_trains_and_resumes_from_anywhere(python_train, run_train, tool, tmp_path):
    flags = ("--ngram_rows=64", "--conv_width=3", *SAVES)
    alone = {"PYTHONPATH": ""}
    whole = python_train("whole", *flags, script=NGRAM, env=alone)
    python_train("run", *flags, "--max_steps=6", "--decay_steps=12", script=NGRAM)
    done = python_train("run", *flags, "--max_steps=12", "--decay_steps=12", script=NGRAM)
    assert done.fingerprint(12)["model"] == whole.fingerprint(12)["model"]
    saved = torch.load(done.checkpoint(12), weights_only=True)
    assert saved["config"]["ngram_rows"] == 64 and saved["model"]["embedding.conv"].shape == (3, 32)
    rows = saved["model"]["embedding.ngram.weight"].norm(dim=1)
    assert (rows > 0).sum() > 20, "they have learned"
    off = python_train("off", "--ngram_rows=0", "--conv_width=1", *SAVES, script=NGRAM)
    stock = run_train("stock", *SAVES)
    assert off.fingerprint(12)["model"] == stock.fingerprint(12)["model"]


def test_a_token_knows_those_before_it_and_none_after(tool):
    source = f"""
import sys
sys.path.insert(0, {str(NGRAM.parent)!r})
import ngram
train.ngram_rows, train.conv_width = 1000, 4
config = dict(block_size=8, n_head=2, n_embd=16, n_layer=1, dropout=0.0)
embedding = train.build_model(config, 20).embedding
torch.nn.init.normal_(embedding.ngram.weight)
tokens = torch.arange(8)[None]
for place in range(8):
    other = tokens.clone()
    other[0, place] = 19
    moved = (embedding(tokens) != embedding(other)).any(-1)[0].tolist()
    assert moved == [0 <= at - place < 4 for at in range(8)], (place, moved)
"""
    tool("sample", before=source, code=2)


def test_images_learn_and_resume(python_train, tmp_path):
    flags = "--dataset=images --block_size=1 --batch_size=64 --eval_tokens=200 --max_steps=60"
    flags, script = [*flags.split(), "--n_embd=16"], REPO / "examples/images.py"
    whole = python_train("whole", *flags, script=script)
    python_train("run", *flags, "--max_steps=30", "--decay_steps=60", script=script)
    done = python_train("run", *flags, "--decay_steps=60", script=script)
    assert done.fingerprint(60)["model"] == whole.fingerprint(60)["model"]
    assert done.rows("eval")[-1]["val_accuracy"] > 0.2, "chance is 0.1"


def test_gpt2_reads_what_hugging_face_writes(python_train, tool, tmp_path):
    from safetensors.torch import load_file, save_file

    script = REPO / "examples/gpt2.py"
    done = python_train("run", *SAVES, "--n_layer=2", "--peak_lr=1e-2", script=script)
    (tmp_path / "hf").mkdir()
    path = tmp_path / "hf/model.safetensors"
    tool("sample", done.out_dir, script, f"--export={path}")
    weights = {f"transformer.{name}": weight for name, weight in load_file(path).items()}
    weights["transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16)
    position = weights["transformer.wpe.weight"]
    weights["transformer.wpe.weight"] = torch.cat([position, position])
    save_file(weights, path, {"format": "pt"})
    again = python_train("again", f"--init_from={path}", "--n_layer=2", script=script)
    last, first = done.rows("eval")[-1], again.rows("eval")[0]
    assert first["val_loss"] == last["val_loss"]


def test_the_recipe_beside_nanogpt_is_nanogpts(tool):
    source = f"""
import sys
sys.path.insert(0, {str(NGRAM.parent)!r})
import plumbing, gpt2, beside_nanogpt as beside
said = dict(word[2:].split("=") for word in beside.NANOGPT.split() if "=" in word)
in_ours = {{"max_iters": "max_steps", "lr_decay_iters": "decay_steps"}}
theirs = {{in_ours.get(name, name): value for name, value in said.items()}}
theirs |= dict(peak_lr=1e-3, min_lr=1e-4, warmup_steps=100, beta1=0.9, beta2=0.99)
theirs |= dict(weight_decay=0.1, grad_clip=1.0)
script, *words = beside.ROWS["same model, same recipe, this loop"].split()
with plumbing.configured(vars(train), argv=words) as ours:
    model = train.build_model(ours, 65)
assert sum(weight.numel() for weight in model.parameters()) == 804_096
for name in theirs.keys() - {{"device", "compile", "eval_iters", "log_interval"}}:
    assert float(ours[name]) == float(theirs[name]), name
"""
    tool("sample", before=source, code=2)
