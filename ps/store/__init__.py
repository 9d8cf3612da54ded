"""The rows of all tables of one process, in memory: tables in shards, admission and eviction of rows, the memory
budget, snapshots for checkpoints, and the kernels that find and update rows."""
