"""Benchmarks of the parameter servers."""
