"""Reads runs, compares them, and writes the HTML page."""
