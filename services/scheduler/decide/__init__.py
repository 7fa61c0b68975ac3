"""State -> commands: what to ask for, and why. Imports `policy`, `evolve`, `state`; `turn.turn` is the way in."""
