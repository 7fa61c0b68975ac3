"""A job's config: its sections, the checks between them, and how it is read from files."""
