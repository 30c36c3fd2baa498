"""The examples, and the forks of docs/forks.md: each does what it is for, and what the loop promises
holds for it, too."""

import json
import os
import re
import runpy
import shutil
import subprocess

import numpy as np
import pytest
import run_page
import torch
from conftest import (
    REPO,
    arguments,
    copy_of_repository,
    first,
    make_dataset,
    pydoc_text,
    run_python,
)
from sources import around

import train
from plumbing import cli, weights

# ---- examples/images.py: the loop does not know what it trains, and buffers are safe, too ----------

EXAMPLE = REPO / "examples" / "images.py"
IMAGES = f"import sys; sys.path.insert(0, {str(EXAMPLE.parent)!r}); import images\n"
RUN = "--dataset=images --block_size=1 --max_steps=24 --save_interval=5 --keep_last=9".split()
RUN += "--dropout=0.2 --ema_decay=0.9 --eval_tokens=100".split()


def test_images_resume_bit_for_bit_with_buffers_and_dropout(straight_and_resumed):
    whole, _ = straight_and_resumed(*RUN, step=18, last=24, before=IMAGES)
    model = torch.load(whole.checkpoint(24))["model"]
    (tracked,) = {int(weight) for name, weight in model.items() if "tracked" in name}
    assert tracked == 24, "each step, and nothing else, moved the buffers once"


def test_images_are_learned_from_any_directory_and_get_a_report(tmp_path):
    flags = ["--max_steps=120", "--device=cpu", "--dtype=float32", f"--out_dir={tmp_path}/out"]
    done = run_python(EXAMPLE, *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    accuracy = float(done.stdout.rpartition("accuracy ")[2].partition("%")[0])
    assert accuracy > 60, "chance is 10"
    assert "accuracy" in (tmp_path / "out" / "report.md").read_text()


# ---- docs/forks.md -------------------------------------------------------------------------------

LORA, SCHEDULE_FREE, REGRESSION, MASKED, SHIFTED, DOCUMENTS, MIXTURE = (
    code.partition("\nif __name__")[0]
    for _, _, language, _, code in run_page.blocks(REPO / "docs/forks.md")
    if language == "python"
)
FLAGS = ["--max_steps=12", "--save_interval=4", "--eval_interval=4", "--audit_interval=5"]
EDIT = "find what changes the number named above"
MORE = {
    LORA: [],
    SCHEDULE_FREE: ["--ema_decay=0.9", "--schedule=constant"],
    REGRESSION: [],
    MASKED: ["--accept=causal"],
    SHIFTED: ["--batch_size=16"],
    DOCUMENTS: [],
    MIXTURE: ["--dataset=code"],
}
NAMES = ["lora", "schedule_free", "regression", "masked", "images", "documents", "mixture"]
SAYS = ["GO", EDIT, "GO", "GO, 1 accepted: causal", "GO", "GO", "GO"]


@pytest.fixture
def base(run_train):
    return run_train("out/base", "--max_steps=6").out_dir / "best.pt"


@pytest.fixture
def texts(tmp_path):
    """The flag for the folder of two texts."""
    make_dataset(tmp_path, "code", pydoc_text()[:20_000], "byte")
    make_dataset(tmp_path, "words", pydoc_text()[-9000:], "byte")
    numbers = torch.rand(400, 4, generator=torch.Generator().manual_seed(0)).numpy()
    np.savetxt(tmp_path / "houses.csv", numbers, delimiter=",")
    return f"--data_dir={tmp_path}"


@pytest.mark.parametrize("fork", MORE, ids=NAMES)
def test_a_fork_of_the_page_resumes_bit_for_bit(straight_and_resumed, base, texts, fork):
    flags = [*FLAGS, *(flag for flag in MORE[fork] if "accept" not in flag)]
    if fork == MIXTURE:
        flags.append(texts)
    straight, _ = straight_and_resumed(*flags, step=7, name="SIGTERM", before=fork)
    losses = [row["val_loss"] for row in straight.rows("eval")]
    assert losses[-1] < losses[0] or fork == SHIFTED  # too few steps for that
    if fork == LORA:
        before, after = torch.load(base)["model"], torch.load(straight.checkpoint(12))["model"]
        after = {name.replace("qkv.linear.", "qkv."): weight for name, weight in after.items()}
        new = {f"blocks.0.attention.qkv.{part}" for part in ("down", "up")}
        assert after.keys() - before.keys() == new
        assert all(torch.equal(before[name], after[name]) for name in after.keys() - new)


@pytest.mark.parametrize("fork, says", first(2, zip(MORE, SAYS, strict=True)))
def test_check_says_go_or_what_to_edit(fork, says, base, texts, data_dir, tmp_path):
    (tmp_path / "fork.py").write_text(fork)
    more = [texts] if fork == MIXTURE else []
    _, *flags = arguments(tmp_path / "b", data_dir, [*MORE[fork], *more])
    done = run_python(REPO / "check.py", "fork.py", *flags, cwd=tmp_path)
    assert says in done.stdout and not done.stderr, done.stdout + done.stderr
    assert done.returncode == (says == EDIT)


def test_best_holds_the_weights_that_were_judged(run_train):
    """The plain loop evaluates the averages of best.pt to the very loss on record."""
    done = run_train("run", *FLAGS, *MORE[SCHEDULE_FREE], before=SCHEDULE_FREE)
    best = min(done.rows("eval"), key=lambda row: row["val_loss"])
    saved = torch.load(done.out_dir / "best.pt")
    assert not torch.equal(saved["ema"]["head.weight"], saved["model"]["head.weight"])
    best_pt = str(done.out_dir / "best.pt")
    load = f"result.load_state_dict(torch.load({best_pt!r}, weights_only=True)['ema'])"
    again = run_train("again", "--max_steps=3", before=around("build_model", then=load))
    assert again.rows("eval")[0]["val_loss"] == best["val_loss"]


def test_a_tokenizer_of_your_own_prepares_trains_resumes_and_samples(
    tmp_path, straight_and_resumed
):
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    blocks = run_page.blocks(REPO / "docs/forks.md")
    (source,) = [code for *_, language, _, code in blocks if language == "py"]
    (add,) = re.findall("^cat bpe.py .*", (REPO / "docs/forks.md").read_text(), re.MULTILINE)
    copy = copy_of_repository(tmp_path / "copy")
    (copy / "bpe.py").write_text(source)
    subprocess.run(add, shell=True, cwd=copy, check=True)
    text = "<|endoftext|>".join([pydoc_text()[:40_000], *["Käse 🐴"] * 99])
    (copy / "mine.txt").write_text(text)
    done = run_python("prepare_data.py", "mine", "--input=mine.txt", "--tokenizer=bpe", cwd=copy)
    assert "bpe tokens" in done.stdout, done.stderr
    assert json.loads((copy / "data/mine/meta.json").read_text())["start_id"] == 0
    flags = ["--dataset=mine", f"--data_dir={copy}/data"]
    _, resumed = straight_and_resumed(*flags, "--save_interval=3", step=7, repo=copy)
    done = run_python("sample.py", resumed.out_dir, "--start=Käse 🐴", cwd=copy)
    assert done.stdout.startswith("Käse 🐴") and len(done.stdout) > 20, done.stderr
    done = run_python(REPO / "sample.py", resumed.out_dir)
    assert "no tokenizer 'bpe'" in done.stderr and done.returncode == 2


# ---- examples/gpt2.py and examples/beside_nanogpt.py -----------------------------------------------


@pytest.fixture
def beside(monkeypatch, train_as_it_was):
    """The names of examples/beside_nanogpt.py, with examples/gpt2.py loaded."""
    monkeypatch.setattr(weights, "read", weights.read)  # which gpt2.py replaces
    monkeypatch.setattr(train, "ADDED_KNOBS", {})
    runpy.run_path(str(REPO / "examples" / "gpt2.py"))
    return runpy.run_path(str(REPO / "examples" / "beside_nanogpt.py"))


SAME = "same model, same recipe, this loop"


def test_the_same_model_and_recipe_are_those_of_nanogpt(beside):
    """What the row does not say is a default of train.py."""
    said = dict(word[2:].split("=") for word in beside["NANOGPT_RECIPE"].split() if "=" in word)
    in_ours = {"max_iters": "max_steps", "lr_decay_iters": "decay_steps"}
    theirs = {in_ours.get(name, name): value for name, value in said.items()}
    theirs |= {"peak_lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 100, "beta1": 0.9, "beta2": 0.99}
    theirs |= {"weight_decay": 0.1, "grad_clip": 1.0}
    script, *words = beside["ROWS"][SAME].split()
    with cli.configured(vars(train), argv=words) as ours:
        model = train.build_model(ours, vocab_size=65)
    assert sum(weight.numel() for weight in model.parameters()) == 804_096
    for name in theirs.keys() - {"device", "compile", "eval_iters", "log_interval"}:
        assert float(ours[name]) == float(theirs[name]), name
    assert (ours["optimizer"], ours["schedule"]) == ("adamw", "cosine")
    assert script == "examples/gpt2.py" and ours["dtype"] == "float32"


@pytest.mark.slow
def test_a_step_is_that_of_nanogpts_own_class(beside, data_dir, monkeypatch):
    """With the same weights: loss and norm within 1e-6."""
    if "NANOGPT" not in os.environ:
        pytest.skip("NANOGPT=FOLDER, a clone of nanoGPT")
    nano = runpy.run_path(os.environ["NANOGPT"] + "/model.py")
    _, *words = beside["ROWS"][SAME].split()
    words += ["--dataset=small", f"--data_dir={data_dir}", "--block_size=16", "--device=cpu"]
    torch.manual_seed(0)
    with train.build(words) as run:
        vocab_size = run.facts["data"]["meta"]["vocab_size"]
        shape = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 16, "bias": False}
        theirs = nano["GPT"](nano["GPTConfig"](vocab_size=vocab_size, dropout=0.0, **shape))
        ours = {}
        for name, weight in theirs.named_parameters():
            name = name.removeprefix("transformer.")
            ours[name] = weight.detach() + 0.1 * torch.randn_like(weight)
            weight.data = ours[name].clone()
            if re.search(r"c_\w+\.weight$", name):  # nanoGPT has (out, in)
                ours[name] = ours[name].T
        run.model.load_state_dict(ours)
        inputs, targets = map(torch.from_numpy, run.train_data[0, 12])
        found = train.train_step(run.model, run, inputs, targets, 1e-3)
        _, loss = theirs(inputs, targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        assert found["loss"].item() == pytest.approx(loss.item(), rel=1e-6)
        assert found["grad_norm"].item() == pytest.approx(norm.item(), rel=1e-6)


# ---- examples/colab.ipynb --------------------------------------------------------------------------


def lines_of_the_cell():
    (cell,) = json.loads((REPO / "examples/colab.ipynb").read_text())["cells"]
    return [line.strip() for line in cell["source"] if not line.startswith("#")]


def test_the_notebook_is_one_cell_that_leaves_torch_alone():
    address, clone, enter, install, check = lines_of_the_cell()
    assert re.fullmatch(r'REPOSITORY = "https://\S+"  # .*', address)
    assert (clone, enter) == ('!git clone -q --depth 1 "$REPOSITORY" loop', "%cd loop")
    words = (
        install.partition("#")[0].removeprefix("!").replace("pip install -q -r /dev/stdin", "cat")
    )
    done = subprocess.run(["bash", "-c", words], cwd=REPO, capture_output=True, text=True)
    assert "numpy" in done.stdout and "torch" not in done.stdout
    assert check.endswith("bash tests/gpu.sh --quick")
    assert "(examples/colab.ipynb)" in (REPO / "README.md").read_text()


@pytest.mark.slow
def test_the_notebook_runs_on_a_cpu(tmp_path):
    *_, check = lines_of_the_cell()
    shutil.copytree(REPO, tmp_path / "copy", ignore=run_page.NOT_COPIED)
    command = check.removeprefix("!") + " --cpu"
    how = {"cwd": tmp_path / "copy", "capture_output": True, "text": True, "timeout": 1200}
    done = subprocess.run(["bash", "-c", command], **how)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for part in ("killed", "gpt2", "gpt2_loose", "tests"):
        assert f"| part {part} | exit code 0" in done.stdout
    assert re.search(r"after SIGKILL \| the same at step 60 .* resumed at \d0, ", done.stdout)
    assert 15 <= len((tmp_path / "copy/out/gpu/results.md").read_text().splitlines()) <= 20
