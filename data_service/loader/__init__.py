"""The client side, in training processes: leases shards, prefetches them, makes batches, and tracks the position."""
