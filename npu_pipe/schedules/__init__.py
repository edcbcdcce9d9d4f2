"""The schedules, one family a file, and their registry. Imports no torch."""
