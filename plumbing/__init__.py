"""What train.py calls: checkpoints, ranks, devices ... Not needed to follow the loop."""
