"""A job's config: its sections, the checks between sections, and the reading of config files."""
