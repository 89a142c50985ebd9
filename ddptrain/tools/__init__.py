"""What stands beside the training: each tool needs the floors below; only its verb or YAML knows it."""
