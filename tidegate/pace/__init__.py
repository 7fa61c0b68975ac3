"""Modelled slots: the time that a step takes on a cited GPU, and what a run says of steps that took longer. Pure."""
