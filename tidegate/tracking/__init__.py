"""A job's metrics for TensorBoard and Weights & Biases: a process that reads its events, and that nobody waits for."""
