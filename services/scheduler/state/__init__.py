"""What the scheduler knows of a job: frozen values, and the rules that every state keeps. Imports no other room."""
