"""The Master's part: the machine that places buckets on pservers, and knows the trainers and the checkpoints. Pure:
events in, effects out."""
