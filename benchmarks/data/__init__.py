"""Benchmarks of the data service."""
