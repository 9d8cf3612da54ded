"""What decides by measurements, not by rules about faults: pure, and each can be left out."""
