"""TinyShakespeare by character with the plain transformer, no extras: below 1.9 in seconds.

python train.py config/shakespeare_plain.py: validation loss 1.893 (seed 1337; 1.899 on another CPU).
It is config/shakespeare_fast.py without its two extras, for 200 steps in place of 90.
"""

out_dir = "out/shakespeare_plain"
dataset = "shakespeare"

block_size = 64  # characters
n_embd = 128
n_head = 2
batch_size = 32

max_steps = 200  # after 90 the loss is 2.099, after 400 it is 1.788
warmup_steps = 4
optimizer = "muon"  # adamw at 6e-3 needs 400 steps to 1.918
momentum = 0.9
schedule = "linear"
peak_lr = 3e-2
min_lr = peak_lr / 100
weight_decay = 0.3
eval_interval = 0  # only before the first step and after the last
report = False  # drawing it takes a second or two; python report.py out/shakespeare_plain
