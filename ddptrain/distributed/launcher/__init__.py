"""Starts ranks, and ends them together."""
