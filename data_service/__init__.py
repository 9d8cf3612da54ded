"""Data sets served to the workers of elastic jobs: leases, readers, accounting."""
