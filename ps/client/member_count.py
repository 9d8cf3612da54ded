"""How many trainers have been members at once. Members come and go between two looks at the present ones, so whoever
waits for a number of them has to see each membership."""

from __future__ import annotations

from collections.abc import Iterable

from ps.protocol.messages import TrainerMember


class MemberCount:
    """The fewest and the most members at once, since this was created or since one trainer, ``number``, became a member
    or ceased to be one."""

    def __init__(self, number: int = 0, members: Iterable[TrainerMember] = ()) -> None:
        self._number = number
        numbers = {one.number for one in members}
        self._member = number in numbers
        self.fewest = self.most = len(numbers)

    def take(self, members: Iterable[TrainerMember]) -> None:
        """Count the next membership."""
        now = MemberCount(self._number, members)
        same = now._member is self._member
        self._member = now._member
        self.fewest = min(self.fewest, now.fewest) if same else now.fewest
        self.most = max(self.most, now.most) if same else now.most
