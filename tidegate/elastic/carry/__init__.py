"""Transports carry out a plan between the tensors of two layouts."""
