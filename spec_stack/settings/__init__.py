"""Building blocks of configurations: documented fields, checks and registries."""
