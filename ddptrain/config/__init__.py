"""The config's schema and its checks. Imports no torch."""
