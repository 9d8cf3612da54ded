"""What the Master's services need is imported before a launcher can be elected."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from edl.config import JobSpec, NodeRange
from edl.job_records import Training
from edl.launch.compose import _services
from edl.types import JobId

assert "ps.coordinator.machine" not in sys.modules
make = _services(JobSpec(JobId("job"), NodeRange(1, 1), servers=Training()), "", "")
before = set(sys.modules)
first, second = make(), make()
assert len(first) == 2 and first[1] is not second[1]
print(sorted(set(sys.modules) - before))
"""


def test_a_new_master_of_a_job_with_parameter_servers_imports_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
