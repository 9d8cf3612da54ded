"""edl for PaddlePaddle scripts."""
