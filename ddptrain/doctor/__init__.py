"""Why is my GPU not used, or slow? Only `proof` and `all_reduce` import torch at the top."""
