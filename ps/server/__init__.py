"""The pserver process: it holds the buckets assigned by the coordinator, serves trainers, replicates its changes to
other pservers, and takes part in checkpoints."""
