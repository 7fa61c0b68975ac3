"""A cluster that stays: its jobs, its folder on this machine, and where a job's GPUs lie in it."""
