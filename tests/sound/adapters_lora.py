"""LoRA beside the matrices of each MLP; all else but the head is frozen."""

from shared import LoRA, train


def build_model(config, vocab_size, inner=train.build_model):
    gpt = inner(config, vocab_size).requires_grad_(False)
    gpt.head.requires_grad_(True)
    for block in gpt.blocks:
        block.mlp.up, block.mlp.down = LoRA(block.mlp.up), LoRA(block.mlp.down)
    return gpt


train.build_model = build_model
