"""The best schedule that a search finds when it knows every length: what the policies are held against."""
