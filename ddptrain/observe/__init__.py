"""What a run shows and leaves behind: read-only observers on rank 0, and the files they write."""
