"""Words for sizes that a rule does not cover."""

from __future__ import annotations

__all__ = ["either"]


def either(below: int, above: int) -> str:
    """The nearest sizes that work; there may be none below."""
    return f"{below} or {above}" if below >= 1 else f"{above}"
