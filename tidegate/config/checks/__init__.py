"""Faults and warnings that concern more than one key of a config."""
