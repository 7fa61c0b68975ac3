"""What the scheduler knows of a job: frozen values, and the invariants of every state. Imports no sibling folder."""
