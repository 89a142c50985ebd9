"""The name under which a training finds who tells it when to go on."""

TURNS = "DDPTRAIN_TURNS"
"""Environment variable: the socket of the bench that has started this training."""
