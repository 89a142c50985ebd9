"""Sets that lie in a bucket, on a web server or in a folder, read a block at a time through a cache."""
