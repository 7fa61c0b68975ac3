"""Events -> state: what an event changes in what is known. Imports `state` alone; `fold.evolve` is the way in."""
