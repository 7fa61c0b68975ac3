"""The learning rate as a function of consumed data: the ledger of progress, its schedule, its checkpoint. Pure."""
