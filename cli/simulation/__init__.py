"""`tidegate simulate`, `plan` and `calibrate`: what they run and what they print."""
