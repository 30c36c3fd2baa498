"""The parts of report.py: rows read back, results, detectors of trouble, the page."""
