"""The Master's lease machine: leases on shards, consumed records, ends of epochs. Pure: events in, effects out; the
Master's shell does the I/O."""
