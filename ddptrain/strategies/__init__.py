"""How a model is spread over devices: one file each."""
