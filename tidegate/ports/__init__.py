"""What the services need from the world, as small protocols; `tidegate.adapters` holds the implementations."""
