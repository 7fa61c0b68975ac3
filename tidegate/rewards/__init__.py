"""Rewards of responses: built-in comparisons, and users' functions in processes of their own with a time limit."""
