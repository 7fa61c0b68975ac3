"""What a response is worth: built-in comparisons and functions of one's own, run apart, with a limit, and weighted."""
