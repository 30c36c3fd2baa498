"""What check.py and replay.py use: a plain loop beside a run, probes, verdicts on seeds, logs read back
and compared, and one step seen from inside."""
