"""The Master's lease machine: which worker reads which shard, what is consumed, when an epoch ends. Pure: it takes
events and returns effects; the Master's shell does the I/O."""
