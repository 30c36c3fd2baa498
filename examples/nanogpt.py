"""nanoGPT's own model on the loop of train.py: what do the loop and the recipe do without our
model?

    NANOGPT=../nanoGPT python examples/nanogpt.py --n_layer=4 --batch_size=12 --beta2=0.99

NANOGPT is a copy of https://github.com/karpathy/nanoGPT, whose class GPT is used as it is. In
bfloat16 it takes its plain attention: on a CPU the fused kernel's backward pass is slow.
"""

import importlib.util
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train  # noqa: E402
from plumbing.cli import fail, run_script  # noqa: E402


def build_model(config, vocab_size):
    path = Path(os.environ.get("NANOGPT") or os.devnull, "model.py")
    if not path.is_file():
        fail("no nanoGPT; type NANOGPT=FOLDER, which holds its model.py, before the command")
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    sys.modules["nanogpt_model"] = nanogpt = importlib.util.module_from_spec(spec)  # in run.json
    spec.loader.exec_module(nanogpt)

    class NanoGPT(nanogpt.GPT):
        def forward(self, tokens, targets=None):
            logits, _ = super().forward(tokens, tokens)  # without targets, only the last logits
            return logits if targets is None else train.cross_entropy(logits, targets)

    shape = {name: config[name] for name in "block_size n_layer n_head n_embd dropout".split()}
    model = NanoGPT(nanogpt.GPTConfig(vocab_size=vocab_size, bias=False, **shape))
    for block in model.transformer.h if train.dtype == "bfloat16" else ():
        block.attn.flash = False
        mask = train.torch.ones(train.block_size, train.block_size).tril()[None, None]
        block.attn.register_buffer("bias", mask, persistent=False)
    return model


vars(train).update(__doc__=__doc__, build_model=build_model, out_dir="out/nanogpt")

if __name__ == "__main__":
    sys.exit(run_script(train.main))
