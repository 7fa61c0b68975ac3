"""The services' ports to the world outside, as small protocols. `tidegate.adapters` holds the implementations."""
