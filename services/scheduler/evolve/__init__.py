"""Folds events into the state. `fold.evolve` is the entry point. It imports `state` alone of its neighbours."""
