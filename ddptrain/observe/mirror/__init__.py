"""A run's folder in a bucket, while it runs (``run.mirror``)."""
