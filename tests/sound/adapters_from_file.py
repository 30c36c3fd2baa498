"""LoRA on the weights of another run, which build_model loads."""

from pathlib import Path

from shared import LoRA, torch, train


def base():
    return Path(train.data_dir).parent / "other.pt"


def build_model(config, vocab_size, inner=train.build_model):
    gpt = inner(config, vocab_size)
    gpt.load_state_dict(torch.load(base(), weights_only=True)["model"])
    gpt.requires_grad_(False)
    for block in gpt.blocks:
        block.attention.qkv = LoRA(block.attention.qkv)
    return gpt


def open_dataset(saved, inner=train.open_dataset):
    *datasets, facts = inner(saved)
    return *datasets, facts | {"files": [str(base())]}


train.build_model, train.open_dataset = build_model, open_dataset
