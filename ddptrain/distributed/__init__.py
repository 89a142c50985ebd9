"""Who am I, how do ranks talk, how is the model spread."""
