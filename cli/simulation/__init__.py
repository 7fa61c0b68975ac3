"""`tidegate simulate`, `plan` and `calibrate`: their work and their output."""
