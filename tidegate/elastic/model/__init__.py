"""A rank's model and optimizer in one layout, and the memory in which they live."""
