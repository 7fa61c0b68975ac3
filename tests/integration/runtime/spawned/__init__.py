"""A service for the tests of the spawner."""
