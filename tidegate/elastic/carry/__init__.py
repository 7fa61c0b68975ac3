"""Transports: what carries out a plan between the tensors of two layouts."""
