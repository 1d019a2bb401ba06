"""A model for lm-evaluation-harness (extra `lm-eval`), found by the entry point `lm_eval.models`."""
