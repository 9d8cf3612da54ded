"""Remote readers: processes that decode shards on other hosts and stream them over Arrow Flight, and their clients."""

POLICIES = ("prefer", "only")
"""Uses of remote readers, as in ``Data(…, remote=…)``; empty: none."""
