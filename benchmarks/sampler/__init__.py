"""What it costs to begin an epoch."""
