"""What configurations are made of: fields with a meaning, and open lists of names."""
