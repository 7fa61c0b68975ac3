"""Membership epochs: which processes belong together, how they meet, decide and leave."""
