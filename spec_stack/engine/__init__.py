"""The engine: scores, selects and decodes a planned request over its caches, and counts."""
