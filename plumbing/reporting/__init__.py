"""What report.py is made of: rows read back, results, detectors of trouble, the page."""
