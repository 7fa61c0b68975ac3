"""The rollout: generates responses and scores them with the task's program."""
