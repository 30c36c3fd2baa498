"""TinyShakespeare by character with one layer: a minute or three on two CPU cores."""

out_dir = "out/shakespeare"
dataset = "shakespeare"

block_size = 128  # characters
n_embd = 192
n_head = 3
n_future_tokens = 3  # learning the two after the next as well lowers the loss of the next
batch_size = 32

max_steps = 1100  # 4.5 epochs
warmup_steps = 20
optimizer = "muon"  # at its best rate, adamw ends higher
peak_lr = 1e-2  # one layer with normalised queries and keys bears twenty times GPT-2's
min_lr = peak_lr / 100
weight_decay = 1.2  # twelve times GPT-2's, or the n-gram table learns so short a text by heart

log_interval = 50
audit_interval = 250  # four of the steps are done twice and compared, for under 1% of the time
