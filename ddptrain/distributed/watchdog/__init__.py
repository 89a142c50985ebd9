"""Watches over a rank: signals, time limits, hangs, ranks that are gone."""
