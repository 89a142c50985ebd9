"""From words to a config. The one room that knows Hydra."""
