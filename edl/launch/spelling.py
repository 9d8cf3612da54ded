"""Options as people spell them, in the one spelling that the launcher reads. Pure.

torchrun takes ``--nproc_per_node`` for ``--nproc-per-node`` and any beginning that only one of its options has
(argparse's ``allow_abbrev``); Paddle's launcher has underscores. Both work here, up to the script's name: what follows
it is the script's own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from edl.errors import UsageError


@dataclass(frozen=True, slots=True)
class Spelling:
    """One option of the launcher."""

    names: tuple[str, ...]
    """All its names, with dashes: ``("-t", "--tee")``."""
    takes_value: bool

    @property
    def name(self) -> str:
        """The one it goes by in messages: its first long name."""
        return next((name for name in self.names if name.startswith("--")), self.names[0])


def one_spelling(arguments: Sequence[str], options: Sequence[Spelling], first: Collection[str] = ()) -> list[str]:
    """The same command line with every option by a name of its own in full, with dashes.

    ``options``: all there are. ``first``: long names among which a beginning is looked up before it is among all.
    What is no option at all stays as it is, but for a ``--`` that follows the script's name. Raises ``UsageError`` for
    a beginning that fits several options, and for an option whose value is left out before another one.
    """
    by_name = {name: option for option in options for name in option.names}
    result: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-") or argument in ("-", "--"):
            result.append(argument)
            if argument == "--":
                break
            # As argparse has it in every Python: the first of them right after the script is not the script's.
            following = list(rest)
            return result + (following[1:] if following[:1] == ["--"] else following)
        name, equals, value = argument.partition("=")
        if not name.startswith("--"):
            result.extend(_short(argument, by_name, rest))
            continue
        if name not in by_name:  # a few are Paddle's only in Paddle's own spelling
            name = _full(name.replace("_", "-"), by_name, first)
        result.append(name + equals + value)
        option = by_name.get(name)
        if option is not None and option.takes_value and not equals:
            result.extend(_value(name, rest, by_name))
    return result + list(rest)


def _short(argument: str, by_name: dict[str, Spelling], rest: Iterator[str]) -> list[str]:
    """``-t 3``, ``-t3`` and ``-t=3``."""
    name, value = argument[:2], argument[2:]
    option = by_name.get(name)
    if option is None or not option.takes_value:
        return [argument]
    if value:
        return [name, value.removeprefix("=")]
    return [name, *_value(name, rest, by_name)]


def _value(name: str, rest: Iterator[str], by_name: dict[str, Spelling]) -> list[str]:
    value = next(rest, None)
    if value is None:
        return []  # click has the words for it
    if value.startswith("--") and value.partition("=")[0].replace("_", "-") in by_name:
        raise UsageError(f"{name} needs a value, but {value} follows it. Write {name}=VALUE")
    return [value]


def _full(name: str, by_name: dict[str, Spelling], first: Collection[str]) -> str:
    """The name that this is, or the only one that begins so; itself when there is none."""
    if name in by_name:
        return name
    for among in (first, by_name):
        fitting = [one for one in among if one.startswith(name) and len(name) > len("--") and one in by_name]
        found = {by_name[one].name: one for one in sorted(fitting, reverse=True)}
        if len(found) == 1:
            return next(iter(found))
        if found:
            candidates = ", ".join(sorted(found.values()))
            raise UsageError(f"{name} may be any of {candidates}. Write more of the one that is meant")
    return name
