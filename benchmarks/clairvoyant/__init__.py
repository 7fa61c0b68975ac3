"""The best schedule of a search that knows every length. The policies are compared with it."""
