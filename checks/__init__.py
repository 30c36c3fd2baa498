"""What check.py asks: plain.py is the loop that it compares train.py with, twin.py the comparison,
probes.py the questions about model, data and knobs, verdicts.py the statistics of --against."""
