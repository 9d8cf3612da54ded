"""Measures what it costs to begin an epoch."""
