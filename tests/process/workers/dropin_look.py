"""Writes what it sees of itself to FOLDER/RANK.json: environment, arguments, how it was started."""

import json
import os
import sys
from pathlib import Path

folder = Path(sys.argv[1])
seen = {
    "environment": dict(os.environ),
    "arguments": sys.argv[2:],
    "unbuffered": [getattr(stream, "write_through", None) for stream in (sys.stdout, sys.stderr)],
    "name": __name__,
    "first on the path": sys.path[0],
    "directory": os.getcwd(),
    "command": sys.orig_argv[1:],
    "leads its session": os.getsid(0) == os.getpid() == os.getpgid(0),
}
part = folder / f"{os.environ['RANK']}.part"
part.write_text(json.dumps(seen))
part.rename(folder / f"{os.environ['RANK']}.json")
sys.stdout.write(f"worker {os.environ['RANK']} was here\n")  # at once, for workers share a pipe under torchrun
