"""The parts of configurations: fields with a meaning, and open lists of names."""
