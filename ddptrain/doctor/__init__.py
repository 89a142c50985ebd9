"""Why is my GPU not used, or slow? Imports no torch at the top of a module."""
