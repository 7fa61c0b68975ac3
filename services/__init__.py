"""The four services of a job; they share `tidegate` and never import each other."""
