"""What a job shows to another user of its host, and what becomes of attacks that once worked."""
