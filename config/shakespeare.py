"""TinyShakespeare by character with one layer: one to three minutes on two CPU cores."""

out_dir = "out/shakespeare"
dataset = "shakespeare"

block_size = 128  # characters
n_embd = 192
n_head = 3
n_future_tokens = 3  # learning to predict two more tokens lowers the loss of the next one
batch_size = 32

max_steps = 1100  # 4.5 epochs
warmup_steps = 20
optimizer = "muon"  # adamw, at its best rate, ends with a higher loss
peak_lr = 1e-2  # far above GPT-2's: one layer with normalized queries and keys tolerates it
min_lr = peak_lr / 100
weight_decay = 1.2  # twelve times GPT-2's, or the n-gram table memorizes so short a text

log_interval = 50
audit_interval = 250  # four steps are computed twice and compared, for under 1% of the time
