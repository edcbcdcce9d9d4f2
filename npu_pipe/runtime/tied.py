"""Tied parameters: one parameter of the model of which several stages hold a copy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from npu_pipe.errors import ConfigError

__all__ = ["Copy", "Tied", "check_tied"]

Copy = tuple[int, str]
"""(stage, name of a parameter of its module)."""


@dataclass(frozen=True, slots=True, init=False)
class Tied:
    """Copies of one parameter, as (stage, name in that stage's module), by stage.

    Tied((0, "embedding.weight"), (3, "head.weight"))

    Raises ConfigError for fewer than two copies, or one named twice.
    """

    copies: tuple[Copy, ...]

    def __init__(self, *copies: Copy) -> None:
        for copy in copies:
            match copy:
                case (int(), str()):
                    pass
                case _:
                    raise ConfigError(
                        "a copy of a tied parameter is a pair (stage, name)",
                        f"{copy!r} was given",
                        'write Tied((0, "embedding.weight"), (3, "head.weight"))',
                    )
        if len(copies) < 2:
            raise ConfigError(
                "a tied parameter has at least two copies",
                f"{len(copies)} was given: {self._text(copies)}" if copies else "none was given",
                "name each stage and its parameter",
            )
        _require_once(copies)
        object.__setattr__(self, "copies", tuple(sorted(copies)))

    def __str__(self) -> str:
        return self._text(self.copies)

    @staticmethod
    def _text(copies: Iterable[Copy]) -> str:
        return " = ".join(f"{stage}:{name}" for stage, name in copies)


def check_tied(tied: Iterable[Tied], *, stages: int) -> None:
    """Raise ConfigError where a stage does not exist, or a copy belongs to two of them."""
    copies = [copy for each in tied for copy in each.copies]
    for stage, name in copies:
        if not 0 <= stage < stages:
            raise ConfigError(
                "a tied parameter has its copies in stages of the schedule",
                f"'{name}' is said to lie in stage {stage}, and the stages are 0 to {stages - 1}",
                "name the stage that holds it",
            )
    _require_once(copies)


def _require_once(copies: Iterable[Copy]) -> None:
    for (stage, name), times in Counter(copies).items():
        if times > 1:
            raise ConfigError(
                "a parameter is one copy of one tied parameter",
                f"'{name}' of stage {stage} is named {times} times",
                "name all copies of it in one Tied, each once",
            )
