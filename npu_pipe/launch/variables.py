"""Environment variables read strictly. An empty variable counts as not set, as in torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from npu_pipe.errors import ConfigError

__all__ = ["is_set", "require", "whole_number"]


def is_set(environ: Mapping[str, str], name: str) -> bool:
    """True if `name` is there and not empty."""
    return bool(environ.get(name))


def require(environ: Mapping[str, str], names: Iterable[str], *, cure: str) -> None:
    """Raise ConfigError that names what is set and what is missing, unless all are set."""
    names = tuple(names)
    missing = [name for name in names if not is_set(environ, name)]
    if missing:
        there = [name for name in names if is_set(environ, name)]
        raise ConfigError(
            f"{_listed(names)} are set together",
            f"{_listed(there) or 'none'} set, {_listed(missing)} missing",
            cure,
        )


def whole_number(
    environ: Mapping[str, str], name: str, *, least: int = 0, most: int, cure: str
) -> int:
    """The value of `name`, from `least` to `most`. Raises ConfigError."""
    text = environ[name]
    if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
        raise ConfigError(
            f"{name} is a whole number from {least} to {most}", f"{name} is {text!r:.40}", cure
        )
    return int(text)


def _listed(names: Iterable[str]) -> str:
    *most, last = list(names) or [""]
    return f"{', '.join(most)} and {last}" if most else last
