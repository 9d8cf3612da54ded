"""Training scripts for the launchers under test."""
