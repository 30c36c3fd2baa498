"""Weights from elsewhere: --init_from of another run, and GPT-2's in Hugging Face's layout."""

import json
import runpy
import shutil
import sys

import pytest
import torch
from conftest import REPO, events, make_dataset, pydoc_text
from helpers import torchrun
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

import train
from sample import main as sample

GPT2 = f"import sys; sys.path.insert(0, {str(REPO / 'examples')!r}); import gpt2\n"
SHAPE = ["--n_embd=32", "--n_head=4", "--n_layer=2", "--block_size=16"]
CONFIG = {"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 24}


def loaded(path):
    return torch.load(path, weights_only=True)


# ---- GPT-2 ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_gpt2_computes_and_trains_as_the_library_does(run_train, data_dir, tmp_path):
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
    flags = ["--weights=gpt2", "--block_size=16", "--max_steps=1", "--warmup_steps=0"]
    done = run_train("out", *flags, before=GPT2)
    tokens = train.np.memmap(data_dir / "small/train.bin", "uint16", "r")
    inputs, targets = map(torch.tensor, train.ShuffledWindows(tokens, 16, 1337)[0, 8])
    ours = runpy.run_path(str(REPO / "examples/gpt2.py"), run_name="script")["GPT2"]
    first, last = (loaded(done.checkpoint(step)) for step in (0, 1))
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
