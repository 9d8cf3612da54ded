"""Training scripts that the launchers under test run."""
