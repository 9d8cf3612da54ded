"""Dataclasses to JSON and back: the only codec for JSON that edl writes or sends.

The types are the schema (``msgspec`` reads their annotations): enums, ``NewType``, optional values, tuples, nested
dataclasses and ``typing.Annotated`` bounds. Unknown keys are ignored, so that an older program can read what a newer
one wrote; a missing key takes the field's default. A bool is not accepted as an int; an int is accepted as a float.

Invalid input raises ``ProtocolError`` with the place, the value there and what to do.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar, cast

import msgspec

from edl.errors import ProtocolError

T = TypeVar("T")

ADVICE = "Sender and receiver must run the same version of edl"
_MOST_SHOWN = 80
"""Characters of a value in an error."""


def encode(value: Any) -> bytes:
    """A dataclass, or a tuple of them, as JSON text."""
    try:
        text = _ENCODER.encode(value)
        if b"null" not in text:
            return text
        # msgspec writes an infinite number or NaN as null, Python by name. Both write None as null.
    except UnicodeEncodeError:
        pass  # a lone surrogate, from a file name that is not valid UTF-8. Python's encoder escapes it
    return json.dumps(to_plain(value), separators=(",", ":")).encode()


def decode(kind: type[T], text: bytes | str, *, what: str = "", advice: str = ADVICE) -> T:
    """The inverse of ``encode``. Raises ``ProtocolError`` with what the text should be and, at the end, what to do."""
    try:
        return cast(T, _decoder(cast(Hashable, kind)).decode(text))
    except (ValueError, RecursionError) as error:
        return _decode_again(kind, text, error, what or f"a {name_of(kind)}", advice)


def to_plain(value: Any) -> Any:
    """Convert a dataclass to a dict of JSON types; sequences may be tuples."""
    return msgspec.to_builtins(value, enc_hook=_exact)


def from_plain(kind: type[T], value: Any, *, what: str = "", advice: str = ADVICE) -> T:
    """The inverse of ``to_plain``. Raises ``ProtocolError``, see ``decode``."""
    try:
        return msgspec.convert(value, kind)
    except (ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(f"not {what or f'a {name_of(kind)}'}: {problem(error, value)}. {advice}") from None


def name_of(kind: Any) -> str:
    """A type's name in an error."""
    return getattr(kind, "__name__", str(kind))


class TaggedUnion(Generic[T]):
    """Codec for several dataclasses, distinguished by a tag in front of their fields: ``{"word":"Hello","name":…}``."""

    def __init__(
        self,
        *kinds: type[Any],
        tag: str,
        what: str,
        advice: str = ADVICE,
        name: Callable[[type[Any]], str] = name_of,
    ) -> None:
        """``tag``: a key that is no field of any kind. ``what``, ``advice``: for errors, see ``decode``. ``name``: the
        tag's value for a kind."""
        self._kinds = {name(kind): kind for kind in kinds}
        self._heads = {
            kind: json.dumps({tag: name}, separators=(",", ":"))[:-1].encode() for name, kind in self._kinds.items()
        }
        self._tag, self._what, self._advice = tag, what, advice
        self._tagged: msgspec.json.Decoder[Any] = msgspec.json.Decoder(
            msgspec.defstruct("Tagged", [("name", str)], rename={"name": tag})
        )

    def encode(self, message: T) -> bytes:
        """Encode one message. Raises ``KeyError`` for a kind that is not in the union."""
        head, fields = self._heads[type(message)], encode(message)
        return head + b"}" if fields == b"{}" else b",".join((head, memoryview(fields)[1:]))

    def decode(self, text: bytes | str) -> T:
        """The inverse of ``encode``. Raises ``ProtocolError``."""
        try:
            name = self._tagged.decode(text).name
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"not {self._what} ({error}): {_shown(text)}. {self._advice}") from None
        kind = self._kinds.get(name)
        if kind is None:
            known = ", ".join(self._kinds)
            raise ProtocolError(
                f"not {self._what}: {self._tag}={short(name)} is none of its kinds ({known}). {self._advice}"
            )
        return cast(T, decode(kind, text, what=f"{self._what} ({name})", advice=self._advice))


def problem(error: Exception, value: Any) -> str:
    """Describe a decoding error: the place, the value there, and what is expected."""
    text, _, path = str(error).partition(" - at `$")
    place = path.rstrip("`").lstrip(".")
    found = _at(value, place)
    return f"{place or 'value'}={short(found)}: {text}" if found is not _LOST else f"{place}: {text}"


def short(value: Any) -> str:
    """A value in an error: on one line, at most 80 characters."""
    text = value if isinstance(value, str) else repr(value)
    text = " ".join(text.split())
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


_LOST = object()


def _at(value: Any, place: str) -> Any:
    """The value at ``members[0].port``; ``_LOST`` where the path cannot be followed, as for a key of a mapping."""
    for step in place.replace("[", ".[").split("."):
        try:
            if step.startswith("["):
                value = value[int(step[1:-1])]
            elif step:
                value = value[step]
        except (LookupError, ValueError, TypeError):
            return _LOST
    return value


def _shown(text: bytes | str) -> str:
    return short(text if isinstance(text, str) else text[: 4 * _MOST_SHOWN].decode(errors="replace"))


def _decode_again(kind: type[T], text: bytes | str, error: Exception, what: str, advice: str) -> T:
    """Read with Python's parser what ``encode`` has written with it: infinite numbers and lone surrogates."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ProtocolError(f"not {what} ({error}): {_shown(text)}. {advice}") from None
    return from_plain(kind, value, what=what, advice=advice)


def _exact(value: Any) -> Any:
    """Subclasses of the basic types, such as ``numpy.float64``, as those types. Raises ``TypeError`` for others."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON: {short(value)}")


_ENCODER = msgspec.json.Encoder(enc_hook=_exact)


@functools.cache
def _decoder(kind: Hashable) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)
