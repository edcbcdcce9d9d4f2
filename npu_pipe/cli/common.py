"""What the verbs share: reading flags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

__all__ = ["Count", "Number", "Output", "optional", "parse_flags"]

Flags = TypeVar("Flags")


def parse_flags(
    kind: type[Flags], argv: Sequence[str], *, verb: str, default: Flags | None = None
) -> Flags:
    """Fill a dataclass of flags from the command line; default: values of those left out.

    Leaves with SystemExit as tyro does: status 0 after --help, status 2 after a mistake, which
    it has explained on stderr.
    """
    return tyro.cli(
        kind,
        prog=f"npu-pipe {verb}",
        args=list(argv),
        default=tyro.MISSING_NONPROP if default is None else default,
        config=(tyro.conf.FlagCreatePairsOff,),
        registry=_readers(),
    )


def optional(read: Callable[[str], Any], metavar: str) -> PrimitiveConstructorSpec[Any]:
    """A flag that may be left out, but has no word "None" in its help and its mistakes."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: read(words[0]),
        is_instance=lambda value: value is not tyro.MISSING,
        str_from_instance=lambda value: ["none" if value is None else str(value)],
    )


def _whole(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"{word!r} is not a whole number") from None


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"{word!r} is not a number") from None


def _readers() -> ConstructorRegistry:
    """How words become values: with mistakes told for people, and "none" for what is left out."""
    registry = ConstructorRegistry()
    readers: dict[Any, tuple[Callable[[str], Any], str]] = {
        int: (_whole, "INT"),
        float: (_number, "FLOAT"),
        int | None: (_unless_none(_whole), "INT"),
        float | None: (_unless_none(_number), "FLOAT"),
        str | None: (_unless_none(str), "STR"),
        Path | None: (_unless_none(Path), "PATH"),
    }

    @registry.primitive_rule
    def _rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        return optional(*readers[info.type]) if info.type in readers else None

    return registry


def _unless_none(read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda word: None if word.lower() == "none" else read(word)


Count: TypeAlias = Annotated[int | None, optional(_whole, "N")]
"""A whole number that may be left out."""

Number: TypeAlias = Annotated[float | None, optional(_number, "FLOAT")]
"""A number that may be left out."""

Output: TypeAlias = Annotated[Path | None, optional(Path, "PATH")]
"""A file to write, if given."""
