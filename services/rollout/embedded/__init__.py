"""A small generation engine in this process, on a CPU, for tests, the demo and machines without a GPU."""
