"""Runs a job on this machine: makes its folder, starts its servers and services, records its end."""
