"""The command `spec-stack`."""
