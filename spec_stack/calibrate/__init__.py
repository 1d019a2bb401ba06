"""Calibration: the cheapest sparse prefill settings of a pair that keep the evidence for a question."""
