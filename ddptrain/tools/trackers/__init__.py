"""Runs in MLflow, Weights & Biases and Trackio: one file each, used by a process beside the training."""
