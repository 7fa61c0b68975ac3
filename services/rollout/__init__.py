"""The rollout: generates responses and computes their rewards."""
