"""Shows what a job exposes to another user of its host, and whether attacks that once worked still do."""
