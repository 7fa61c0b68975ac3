"""Hugging Face checkpoints in and out: their config, their tensors' names, their files, read and written by slices."""
