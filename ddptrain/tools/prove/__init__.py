"""Starts trainings, ends them, and compares what is left."""
