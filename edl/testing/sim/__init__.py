"""SimWorld: the real machines in a world of virtual time, where everything that can go wrong does."""
