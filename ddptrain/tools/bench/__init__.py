"""Compares trainings that take turns on one machine."""
