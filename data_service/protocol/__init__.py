"""The messages between workers, the Master's lease machine and ``edl data add``: dataclasses and their JSON encoding.
Pure."""
