"""The bounds of settings, refused with the name of the setting."""

from __future__ import annotations

import math
from collections.abc import Mapping

from npu_pipe.errors import ConfigError

__all__ = ["at_least", "between"]


def at_least(lowest: float, **settings: float) -> None:
    """Raise ConfigError for a setting below `lowest`; `section__key` stands for section.key."""
    _check(lowest, math.inf, f"at least {lowest}", settings)


def between(lowest: float, highest: float, **settings: float) -> None:
    """Raise ConfigError for a setting outside lowest..highest, the ends included."""
    _check(lowest, highest, f"from {lowest} to {highest}", settings)


def _check(lowest: float, highest: float, rule: str, settings: Mapping[str, float]) -> None:
    for name, value in settings.items():
        if not (math.isfinite(value) and lowest <= value <= highest):
            key = name.replace("__", ".")
            raise ConfigError(f"{key} is {rule}", f"it is {value}", f"give {key} {rule}")
