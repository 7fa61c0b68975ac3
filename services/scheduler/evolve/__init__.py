"""Folds events into the state. Imports the folder `state` alone. `fold.evolve` is the entry point."""
