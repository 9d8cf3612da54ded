"""Checkpoints: in memory, where they outlive the workers; in a checkpoint directory; and reading them back."""
