"""State -> commands, with the reason for them. Imports `policy`, `evolve` and `state`. Enter at `turn.turn`."""
