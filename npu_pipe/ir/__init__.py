"""Schedules and programs as data, and their proof. Imports no torch."""
