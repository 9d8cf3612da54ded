"""The checkpoint directory: its layout, crash-safe writing, retention and disk space."""
