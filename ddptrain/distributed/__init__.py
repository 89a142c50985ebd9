"""Which device, how many threads, how ranks talk."""
