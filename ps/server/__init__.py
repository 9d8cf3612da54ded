"""A pserver process: it holds the buckets that the coordinator gives it, answers trainers, copies its changes to other
pservers, and takes part in checkpoints."""
