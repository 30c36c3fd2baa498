"""The shape of GPT-2 124M on OpenWebText: torchrun --standalone --nproc_per_node=8 train.py
config/gpt2_124m.py, or, to try it on one GPU, python train.py config/gpt2_124m.py --max_steps=100.

Prepare the text (40 GB) first. docs/howto.md says how to write openwebtext.jsonl:
python prepare_data.py openwebtext --input=openwebtext.jsonl --tokenizer=gpt2
"""

out_dir = "out/gpt2_124m"
dataset = "openwebtext"

n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024  # tokens

batch_size = 16  # sequences; train.py halves the micro-batch if GPU memory runs out
accum_steps = 32  # 16 x 32 x 1,024 = 524,288 tokens a step, on any number of GPUs
num_workers = 2

peak_lr = 6e-4
min_lr = 6e-5
warmup_steps = 715  # 375 million tokens, as GPT-3 (Brown et al. 2020, appendix B)
# 75 billion tokens, 8 epochs: a quarter of nanoGPT's 600,000 steps. Pythia (Biderman et al. 2023)
# takes 143,000 steps, too, on four times as many tokens in each.
max_steps = 143_000
weight_decay = 0.1

eval_interval = 1000
save_interval = 1000
