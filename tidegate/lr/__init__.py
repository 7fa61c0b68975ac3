"""The learning rate as a function of consumed data: the ledger, its schedule, its checkpoint. Pure."""
