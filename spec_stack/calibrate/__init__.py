"""Finds the cheapest settings of a pair's sparse prefill that keep what a question is about."""
