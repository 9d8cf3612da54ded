"""Leaves its environment in FOLDER, in a file named after its role and port; a pserver ends with SUITE_SERVER_STATUS as
long as there is no file FOLDER/again."""

import json
import os
import sys
from pathlib import Path

folder = Path(sys.argv[1])
role, port = os.environ["PADDLE_ROLE"], os.environ["PADDLE_PORT"]
(folder / f"{role}-{port}.json").write_text(json.dumps(dict(os.environ)))
print(f"a {role} was here")
status = int(os.environ.get("SUITE_SERVER_STATUS", "0"))
if role == "PSERVER" and status and not (folder / "again").exists():
    (folder / "again").touch()
    sys.exit(status)
