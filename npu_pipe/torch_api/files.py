"""Orders in torch's CSV form, with transfers ("compute_comms") or without ("compute_only")."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypeAlias, get_args

from npu_pipe.errors import ConfigError
from npu_pipe.ir.csv_files import (
    program_from_csv,
    program_to_csv,
    schedule_from_csv,
    schedule_to_csv,
)
from npu_pipe.ir.schedule import Schedule
from npu_pipe.lowering.lower import lower

__all__ = ["Form", "read_order", "write_order"]

Form: TypeAlias = Literal["compute_only", "compute_comms"]

# Not the file's own: each rank may have a copy, in a temporary file of any name, and the ranks
# compare what they run with its name.
_NAME = "csv"


def read_order(filename: str, *, form: Form) -> Schedule:
    """The schedule of a file, proved; transfers are proved too, and not kept."""
    _require_form(form)
    text = Path(filename).read_text()
    if form == "compute_comms":
        return program_from_csv(text, name=_NAME).schedule
    return schedule_from_csv(text, name=_NAME)


def write_order(schedule: Schedule, filename: str, *, form: Form) -> None:
    """The other way round. Transfers are those that would be run for equal costs."""
    _require_form(form)
    only = form == "compute_only"
    text = schedule_to_csv(schedule) if only else program_to_csv(lower(schedule))
    Path(filename).write_text(text)


def _require_form(form: str) -> None:
    if form not in get_args(Form):
        raise ConfigError(
            f"the form of a file is {' or '.join(get_args(Form))}",
            f"{form!r} was asked for",
            "take one of them",
        )
