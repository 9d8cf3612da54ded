"""Data sets for the workers of elastic jobs: leases on shards, file readers, accounting of consumed records."""
