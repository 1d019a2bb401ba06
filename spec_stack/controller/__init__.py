"""The draft-length policies, one per file, and the acceptance and cost models that they learn."""
