"""What a user calls: the generator, sessions, and transformers' own generate."""
