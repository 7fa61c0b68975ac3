"""Checks that the new layout holds what the old one held: sums of tensors, and the certificate."""
