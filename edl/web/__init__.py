"""The Master over HTTP: the scale interface as JSON."""
