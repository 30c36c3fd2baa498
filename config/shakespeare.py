"""TinyShakespeare by character, one layer."""

out_dir = "out/shakespeare"
dataset = "shakespeare"
peak_lr = 5e-3
min_lr = 5e-4
max_steps = 1000
batch_size = 32
