"""What check.py and replay.py share: logs read back and compared, and one step seen from inside."""
