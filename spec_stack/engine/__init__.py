"""A planned request over its caches: score, select, decode, count."""
