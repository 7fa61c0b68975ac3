"""The `tidegate` command. It stands on top of everything, and no other part imports it."""
