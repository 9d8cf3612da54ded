"""Normalises the spelling of options on a command line: underscores and abbreviations become full names with dashes.
Pure.

torchrun accepts ``--nproc_per_node`` for ``--nproc-per-node`` and any unambiguous prefix (argparse's ``allow_abbrev``);
Paddle's launcher uses underscores. edl accepts both, up to the script's name: what follows belongs to the script.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from edl.errors import UsageError


@dataclass(frozen=True, slots=True)
class Spelling:
    """The names of one option, and whether it takes a value."""

    names: tuple[str, ...]
    """All its names, with dashes: ``("-t", "--tee")``."""
    takes_value: bool

    @property
    def name(self) -> str:
        """Its first long name, which identifies it; a short name if there is no long one."""
        return next((name for name in self.names if name.startswith("--")), self.names[0])


def one_spelling(arguments: Sequence[str], options: Sequence[Spelling], first: Collection[str] = ()) -> list[str]:
    """The same command line with every option in full, with dashes.

    ``options``: all options. ``first``: long names that a prefix is compared with before all others. Arguments that are
    not options stay as they are, except that a ``--`` right after the script's name is removed. Raises ``UsageError``
    for an ambiguous prefix, and for an option without its value that is followed by another option.
    """
    by_name = {name: option for option in options for name in option.names}
    result: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-") or argument in ("-", "--"):
            result.append(argument)
            if argument == "--":
                break
            # As in argparse, a "--" right after the script's name is not passed to the script.
            following = list(rest)
            return result + (following[1:] if following[:1] == ["--"] else following)
        name, equals, value = argument.partition("=")
        if not name.startswith("--"):
            result.extend(_short(argument, by_name, rest))
            continue
        if name not in by_name:  # a few of Paddle's options exist with underscores only
            name = _full(name.replace("_", "-"), by_name, first)
        result.append(name + equals + value)
        option = by_name.get(name)
        if option is not None and option.takes_value and not equals:
            result.extend(_value(name, rest, by_name))
    return result + list(rest)


def _short(argument: str, by_name: dict[str, Spelling], rest: Iterator[str]) -> list[str]:
    """Split a short option and its value: ``-t 3``, ``-t3`` or ``-t=3``."""
    name, value = argument[:2], argument[2:]
    option = by_name.get(name)
    if option is None or not option.takes_value:
        return [argument]
    if value:
        return [name, value.removeprefix("=")]
    return [name, *_value(name, rest, by_name)]


def _value(name: str, rest: Iterator[str], by_name: dict[str, Spelling]) -> list[str]:
    """Take the value of an option from the rest of the command line. Raises ``UsageError`` if an option follows."""
    value = next(rest, None)
    if value is None:
        return []  # click reports it
    if value.startswith("--") and value.partition("=")[0].replace("_", "-") in by_name:
        raise UsageError(f"{name} needs a value, but {value} follows it. Write {name}=VALUE")
    return [value]


def _full(name: str, by_name: dict[str, Spelling], first: Collection[str]) -> str:
    """Complete an abbreviated option; returns ``name`` if no option begins with it. Raises ``UsageError`` if it is
    ambiguous."""
    if name in by_name:
        return name
    for among in (first, by_name):
        fitting = [one for one in among if one.startswith(name) and len(name) > len("--") and one in by_name]
        found = {by_name[one].name: one for one in sorted(fitting, reverse=True)}
        if len(found) == 1:
            return next(iter(found))
        if found:
            candidates = ", ".join(sorted(found.values()))
            raise UsageError(f"{name} is ambiguous: it could be any of {candidates}. Write the option in full")
    return name
