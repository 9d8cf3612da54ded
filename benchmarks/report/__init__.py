"""All peers in one report: ``python -m benchmarks.report --out DIR``."""
