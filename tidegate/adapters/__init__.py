"""Implementations of `tidegate.ports`: NATS, Redis, gRPC, and in memory. Built by a `__main__` only."""
