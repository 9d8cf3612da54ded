"""The client side, in the training process: leases shards, reads them ahead, makes batches, and keeps the position."""
