"""Side-by-side measurements of edl and of the launchers people use today. Start with ``benchmarks/README.md``."""
