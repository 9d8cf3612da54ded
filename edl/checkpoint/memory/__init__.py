"""In-memory checkpoints: commits of this node's workers, kept by the launcher and copied to other nodes."""
