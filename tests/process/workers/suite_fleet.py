"""Asks Paddle's own role maker who this process is, and leaves the answer in FOLDER."""

import os
import sys
from pathlib import Path

from paddle.distributed.fleet.base.role_maker import PaddleCloudRoleMaker

maker = PaddleCloudRoleMaker(is_collective=False)
maker._generate_role()
who = f"server {maker._server_index()}" if maker._is_server() else f"worker {maker._worker_index()}"
found = f"{who} of {maker._server_num()} and {maker._worker_num()}"
(Path(sys.argv[1]) / str(os.getpid())).write_text(found)
