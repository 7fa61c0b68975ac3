"""The scheduler among the other processes: the loop, the store, the bus, gRPC. All I/O of the scheduler is here."""
