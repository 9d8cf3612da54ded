"""Messages between workers, the Master's lease machine and ``edl data add``: dataclasses and their JSON text. Pure."""
