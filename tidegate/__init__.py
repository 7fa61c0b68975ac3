"""Tidegate: RL post-training in which GPUs change hands while the iteration runs."""
