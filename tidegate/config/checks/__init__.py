"""What no single key can be checked for: faults and warnings of a config as a whole."""
