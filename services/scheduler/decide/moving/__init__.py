"""Commands that plan, continue and end transitions of GPUs. Enter at `moves.needed_moves`."""
