"""Find a schedule: search for one, and say how far it is from the best. Imports no torch."""
