"""The in-memory rows of all tables of one process: sharded tables, admission, eviction, memory budget, snapshots for
checkpoints, and the kernels that find and update rows."""
