"""The Hydra configs, one YAML a choice; a package so that they can be found when installed."""
