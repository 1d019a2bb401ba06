"""A model of lm-evaluation-harness (the extra `lm-eval`), by the entry point `lm_eval.models`."""
