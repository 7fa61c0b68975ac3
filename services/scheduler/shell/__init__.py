"""All I/O of the scheduler: its loop, the store, the bus and gRPC."""
