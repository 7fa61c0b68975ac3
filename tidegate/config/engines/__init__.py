"""What the config and the launcher know of each engine. `services.rollout.engines` starts them under the same names."""
