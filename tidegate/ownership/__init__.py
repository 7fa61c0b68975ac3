"""The ownership of GPUs: the records, the legal steps of a transition, and the adoption of a store."""
