"""The kinds of devices that can be asked for. Imports no torch."""

from __future__ import annotations

from npu_pipe.errors import ConfigError

__all__ = ["KINDS", "require_known"]

KINDS = ("auto", "npu", "cuda", "cpu")
"""`auto` is the first of the others that can be used."""


def require_known(wanted: str) -> None:
    """Raise ConfigError for any other."""
    if wanted not in KINDS:
        raise ConfigError(
            f"devices are {', '.join(KINDS)}",
            f"{wanted!r} was asked for",
            "take one of them",
        )
