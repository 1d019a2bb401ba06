"""One draft model for both phases of LLM inference: sparse prefill and speculative decoding."""
