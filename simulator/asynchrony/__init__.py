"""A training whose rollout runs ahead of its trainer, within a bound of staleness."""
