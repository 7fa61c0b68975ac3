"""What `tidegate plan` answers before a job starts: splits, gains and needs. A config goes in, values come out.

Nothing here prints, and nothing starts.
"""
