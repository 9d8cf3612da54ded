"""Traces of the changes of the world for OpenTelemetry (``--otlp-endpoint``).

- ``spans`` makes spans from the lines of the history, ``otlp`` sends them with the OpenTelemetry SDK, an extra.
"""
