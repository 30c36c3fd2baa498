"""TinyShakespeare by character with one layer and both extras, for the lowest loss: minutes on two
CPU cores.

python examples/ngram.py config/shakespeare_best.py: validation loss 1.446 ± 0.003 (three seeds).
"""

out_dir = "out/shakespeare_best"
dataset = "shakespeare"

block_size = 256  # characters; twice the context of config/shakespeare_extras.py
n_embd = 256
n_head = 4
batch_size = 16
ngram_rows = 8192  # worth 0.06 in config/shakespeare_extras.py; it holds 71% of the parameters
conv_width = 4  # worth another 0.08 there
dropout = 0.05  # with much less it memorizes the text; with much more it learns slowly

max_steps = 1400  # 5.7 epochs; after twice as many steps the validation loss is higher
warmup_steps = 20
optimizer = "muon"
peak_lr = 1e-2
min_lr = peak_lr / 100
weight_decay = 1.2

compile = True  # dropout then is a part of the product's kernel
log_interval = 50
