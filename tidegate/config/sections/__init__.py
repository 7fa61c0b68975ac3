"""The keys of a config and their defaults, a section a module. A section knows its own keys alone."""
