"""Configs as RLinf writes them: what they say in Tidegate's keys, and by name what cannot be done as they say."""
