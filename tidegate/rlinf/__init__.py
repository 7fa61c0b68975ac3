"""RLinf's configs: their translation into Tidegate's keys, and a named fault for each value without a counterpart."""
