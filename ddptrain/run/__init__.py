"""One file a verb: they assemble the engine from a config and run it."""
