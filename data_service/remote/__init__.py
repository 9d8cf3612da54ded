"""Remote readers: processes that decode shards elsewhere and stream them over Arrow Flight, and their clients."""
