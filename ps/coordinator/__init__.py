"""The Master's part: a pure machine that places buckets on pservers and tracks trainers and checkpoints."""
