"""State -> commands: what to ask for, and why. Imports `policy`, `evolve`, `state`; `decision.decide` is the way in."""
