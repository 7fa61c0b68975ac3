"""YAML files and `key=value` words -> the values of a config, each with its origin."""
