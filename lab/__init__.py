"""What only check.py and replay.py use: a plain loop, probes, verdicts, a run read back."""
