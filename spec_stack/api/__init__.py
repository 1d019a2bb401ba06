"""The calls of a user: the generator, sessions, and transformers' own generate."""
