"""Weights from elsewhere: --init_from of another run, and GPT-2's in Hugging Face's layout."""

import json
import runpy

import pytest
import torch
from conftest import REPO, events, make_dataset, pydoc_text
from helpers import torchrun
from safetensors.torch import load_file, save_file
from sources import stop_at
from torch.nn.functional import cross_entropy

import sample
import train
from plumbing import weights

PARENT = ["--max_steps=6", "--ema_decay=0.5"]


def first_loss(done):
    return done.rows("eval")[0]["val_loss"]


@pytest.fixture
def parent(run_train):
    return run_train("out/parent", *PARENT)


# ---- --init_from ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["checkpoint", "export", "sharded"])
def test_a_run_begins_with_the_averages_of_another(parent, run_train, python_train, tmp_path, kind):
    last = parent.rows("eval")[-1]["val_loss"]
    path = parent.checkpoint(6)
    if kind == "export":
        path = tmp_path / "weights.safetensors"
        sample.main([str(parent.out_dir), f"--export={path}"])
    flags = [f"--init_from={path}", "--max_steps=3", "--ema_decay=0.9"]
    if kind == "sharded":
        two = {"launcher": torchrun(2)}
        child = python_train("child", *flags, "--shard=true", "--batch_size=4", **two)
        assert first_loss(child) == pytest.approx(last, abs=1e-6)
    else:
        child = run_train("child", *flags)
        assert first_loss(child) == last != first_loss(run_train("random", "--max_steps=3"))
    begun = torch.load(child.checkpoint(0))
    for name, average in torch.load(parent.checkpoint(6))["ema"].items():
        assert torch.equal(begun["model"][name], average)
        assert torch.equal(begun["ema"][name], average)
    assert (begun["state"]["step"], begun["optimizer"][0]["state"]) == (0, {})


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_it_resumes_bit_for_bit_also_without_the_file(parent, run_train, name):
    path = parent.checkpoint(6)
    flags = [f"--init_from={path}", "--save_interval=4"]
    straight = run_train("straight", *flags)
    run_train("run", *flags, before=stop_at(9, name), code=None)
    path.write_bytes(path.read_bytes() + b".")
    changed = run_train("run", *flags, "--max_steps=11", code=None)
    path.unlink()
    gone = run_train("run", *flags)
    for done in (changed, gone):
        assert "is gone or has changed" in done.stdout
        assert all(row["equal"] == row["compared"] for row in events(done, "resume_checked"))
    assert gone.fingerprint(12) == straight.fingerprint(12)
    digests = {torch.load(run.checkpoint(12))["run"]["init_sha256"] for run in (straight, gone)}
    assert len(digests) == 1 and None not in digests


def test_what_does_not_fit_is_one_line_and_writes_nothing(parent, run_train, data_dir, tmp_path):
    make_dataset(data_dir, "accented", pydoc_text()[:3000].replace("e", "é"))
    file = parent.checkpoint(6)
    cut, bare, short = (tmp_path / f"{name}.safetensors" for name in ("cut", "bare", "short"))
    sample.main([str(file), f"--export={bare}"])
    cut.write_bytes(bare.read_bytes()[:-9])
    tensors = load_file(bare)
    save_file(tensors, bare)  # without metadata
    save_file({name: tensors[name] for name in list(tensors)[1:]}, short)
    cases = {
        ("--n_embd=64", "--n_layer=2"): "write --n_layer=1 --n_embd=32",
        ("--n_head=4",): "write --n_head=2",  # which leaves no shape
        ("--dataset=accented",): "other chars; write python prepare_data.py",
        (f"--init_from={bare}", "--n_layer=2"): "absent",
        (f"--init_from={short}",): "absent; expected torch.Size",
        (f"--init_from={cut}",): "not fully covered",
        (f"--init_from={tmp_path}",): "Is a directory",
        ("--init_from=scratch",): "leave it out",
        ("--init_from=gpt2",): "examples/gpt2.py --weights=FOLDER",
        (f"--resume={file}", "--max_steps=6"): "init_from",
    }
    for flags, expected in cases.items():
        done = run_train("child", f"--init_from={file}", *flags, code=2)
        assert expected in done.stderr and done.stderr.count("\n") == 1, done.stderr
        assert not done.out_dir.exists()
    done = run_train("child", f"--init_from={bare}", "--max_steps=3")
    assert "n_head and vocabulary: they are not compared" in done.stdout


# ---- GPT-2 ---------------------------------------------------------------------------------------

GPT2 = f"import sys; sys.path.insert(0, {str(REPO / 'examples')!r}); import gpt2\n"
GPT2 += "main = train.main; train.main = lambda: gpt2.read_flag() or main()\n"


@pytest.mark.slow
def test_gpt2_computes_and_trains_as_the_library_does(
    run_train, data_dir, tmp_path, train_as_it_was, monkeypatch
):
    """Logits, and one step beside the same step in plain torch, within 1e-5."""
    library = pytest.importorskip("transformers", reason="pip install transformers")
    torch.manual_seed(0)
    vocab_size = json.loads((data_dir / "small/meta.json").read_text())["vocab_size"]
    shape = {"n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4}
    model = library.GPT2LMHeadModel(library.GPT2Config(vocab_size=vocab_size, **shape)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    model.save_pretrained(tmp_path / "gpt2")
    flags = ["--weights=gpt2", "--n_layer=2", "--n_head=4", "--block_size=16", "--max_steps=1"]
    done = run_train("out", *flags, "--warmup_steps=0", before=GPT2)
    tokens = train.np.memmap(data_dir / "small/train.bin", "uint16", "r")
    inputs, targets = map(torch.tensor, train.ShuffledWindows(tokens, 16, 1337)[0, 8])
    monkeypatch.setattr(weights, "read", weights.read)  # which the example replaces
    ours = runpy.run_path(str(REPO / "examples/gpt2.py"), run_name="script")["GPT2"]
    first, last = (torch.load(done.checkpoint(step)) for step in (0, 1))
    ours = ours(first["config"], vocab_size)
    ours.load_state_dict(first["model"])
    logits = model(inputs).logits
    torch.testing.assert_close(ours.eval()(inputs), logits, rtol=0, atol=1e-5)
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    (row,) = done.rows("train")
    assert (row["loss"], row["grad_norm"]) == pytest.approx((loss.item(), norm.item()), abs=1e-5)
    matrices = {"params": [weight for weight in model.parameters() if weight.ndim > 1]}
    vectors = {"params": [w for w in model.parameters() if w.ndim == 1], "weight_decay": 0.0}
    torch.optim.AdamW([matrices, vectors], row["lr"], (0.9, 0.95), weight_decay=0.1).step()
    expected = model.transformer.state_dict()
    assert expected.keys() == last["model"].keys()
    for name, weight in last["model"].items():
        apart = (weight - expected[name][: len(weight)]).abs()
        if name.endswith("c_attn.bias"):  # softmax cancels that of the keys: its gradient is noise
            apart[32:64] = 0
        assert apart.max() < 1e-5 < (weight - first["model"][name]).abs().max(), name


def test_a_folder_in_the_librarys_layout_is_read_or_refused_in_one_line(run_train, tmp_path):
    """Here the example's own weights, under the names that the library gives them."""
    made = run_train("made", "--n_layer=2", "--block_size=24", before=GPT2)
    config = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 24}
    weights = {f"transformer.{k}": v for k, v in torch.load(made.checkpoint(12))["model"].items()}
    file = tmp_path / "hf/model.safetensors"
    file.parent.mkdir()

    def run(out_dir, *flags, without=None, size=None, code=2, **changes):
        save_file({name: weights[name] for name in weights.keys() - {without}}, file)
        file.write_bytes(file.read_bytes()[:size])
        (tmp_path / "hf/config.json").write_text(json.dumps(config | changes))
        return run_train(out_dir, "--weights=hf", "--n_layer=2", *flags, before=GPT2, code=code)

    wte = "transformer.wte.weight"
    whole = run("whole", "--block_size=24", code=0)
    assert first_loss(whole) == made.rows("eval")[-1]["val_loss"]
    for expected, done in {
        "[24, 32]); expected torch.Size([32, 32])": run("bad", "--block_size=32"),
        "write --n_head=2": run("bad", "--n_head=4"),
        "wte.weight is absent": run("bad", without=wte),
        "not fully covered": run("bad", size=9999),
        "'activation_function': 'gelu_new'": run("bad", activation_function="relu"),
        "missing or not that of a GPT-2": run("bad", n_layer=None),
    }.items():
        assert expected in done.stderr and done.stderr.count("\n") == 1, done.stderr
        assert not done.out_dir.exists()
