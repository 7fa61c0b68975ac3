"""What moving GPUs needs next: transitions planned, carried on and ended. `moves.wanted_moves` is the way in."""
