"""A job's metrics for TensorBoard and Weights & Biases, from a process that reads its events and delays nothing."""
