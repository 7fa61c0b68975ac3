"""The `tidegate` command. It stands on top of everything, and nothing imports it."""
