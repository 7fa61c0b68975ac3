"""The scheduler: stateless; evolves the job's state, decides, checks, issues commands."""
