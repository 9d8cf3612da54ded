"""edl for PyTorch scripts."""
