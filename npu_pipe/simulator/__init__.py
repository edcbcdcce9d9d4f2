"""Costs, and the timelines they predict. Imports no torch."""
