"""Why is my GPU not used, or slow? Only `proof` and `meet` import torch at the top."""
