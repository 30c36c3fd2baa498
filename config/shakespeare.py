"""TinyShakespeare by character with the plain transformer: one layer, no extras, minutes on two CPU
cores.

python train.py config/shakespeare.py: validation loss 1.577 ± 0.003 (five seeds).
config/shakespeare_extras.py, for examples/ngram.py, adds a table and a convolution: 1.462 ± 0.003.
"""

out_dir = "out/shakespeare"
dataset = "shakespeare"

block_size = 128  # characters
n_embd = 192
n_head = 6  # with 3 heads 1.606
batch_size = 32

max_steps = 1100  # 4.5 epochs
warmup_steps = 20
optimizer = "muon"
peak_lr = 1e-2  # far above GPT-2's: one layer with normalized queries and keys tolerates it
min_lr = peak_lr / 100
weight_decay = 1.2  # twelve times GPT-2's, as in config/shakespeare_extras.py: the text is short

log_interval = 50
