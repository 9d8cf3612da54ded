"""Remote readers: processes that decode shards on other hosts and stream them over Arrow Flight, and their clients."""
