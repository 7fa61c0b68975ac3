"""From YAML files and `key=value` words to the values of a config, each with its origin."""
