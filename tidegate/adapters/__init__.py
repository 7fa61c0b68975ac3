"""Implementations of `tidegate.ports`: NATS, Redis, gRPC, and in memory. Only a `__main__` builds them."""
