"""The scheduler's values as messages and as stored bytes, and back."""
