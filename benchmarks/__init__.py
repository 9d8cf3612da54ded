"""Side-by-side measurements of edl and of other launchers in use today. Start with ``benchmarks/README.md``."""
