"""Convert the scheduler's values to messages and to stored bytes, and back."""
