"""Runs a job on this machine: its folder, its servers and services, its end."""
