"""The loop and its parts. Knows of no model, no file format and no terminal."""
