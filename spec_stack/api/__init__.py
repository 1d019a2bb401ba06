"""The user's calls: the generator, sessions, and a `custom_generate` for transformers."""
