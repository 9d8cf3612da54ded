"""The versions of a trainer's package with which an integration was tested."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TestedVersions:
    """A range of releases of one package."""

    __test__ = False  # not a test class, whatever its name begins with

    package: str
    first: str
    """The oldest tested release."""
    below: str
    """The first release that is not covered."""

    def warning(self, installed: str) -> str:
        """A warning for an installed version outside the range; empty for one inside."""
        if release(self.first) <= release(installed) < release(self.below):
            return ""
        return (
            f"{self.package} {installed} is installed, and edl was tested with {self.first} up to, but not including, "
            f"{self.below}. If training fails or its results differ, install a tested version: "
            f"pip install '{self.package}>={self.first},<{self.below}'"
        )

    def warn(self, installed: str) -> None:
        """Issue the warning, if there is one, at the line that has called the caller."""
        if text := self.warning(installed):
            warnings.warn(text, stacklevel=3)


def release(version: str) -> tuple[int, ...]:
    """The numbers at the beginning of a version, for comparisons: ``"5.23.0rc1"`` becomes ``(5, 23)``."""
    numbers = [int(part) for part in re.match(r"(\d+(?:\.\d+)*)?", version)[0].split(".") if part]  # type: ignore[index]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
