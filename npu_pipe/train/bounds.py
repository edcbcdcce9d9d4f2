"""The bounds of settings, refused with the name of the setting."""

from __future__ import annotations

import math
from collections.abc import Mapping

from npu_pipe.errors import ConfigError

__all__ = ["at_least", "between"]

_MOST = 2**63 - 1  # what torch and numpy can hold


def at_least(lowest: float, **settings: float) -> None:
    """Raise ConfigError for a setting below `lowest`; `section__key` stands for section.key."""
    for name, value in settings.items():
        too_many = isinstance(value, int) and value > _MOST
        rule = f"at most {_MOST}" if too_many else f"at least {lowest}"
        rule += " and finite" if value == math.inf else ""
        _check(lowest, _MOST if too_many else math.inf, rule, {name: value})


def between(lowest: float, highest: float, **settings: float) -> None:
    """Raise ConfigError for a setting outside lowest..highest, the ends included."""
    _check(lowest, highest, f"from {lowest} to {highest}", settings)


def _check(lowest: float, highest: float, rule: str, settings: Mapping[str, float]) -> None:
    for name, value in settings.items():
        if not (lowest <= value <= highest and value < math.inf):  # False for NaN
            key = name.replace("__", ".")
            raise ConfigError(f"{key} is {rule}", f"it is {value!s:.40}", f"give {key} {rule}")
