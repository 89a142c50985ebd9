"""Pictures with masks."""
