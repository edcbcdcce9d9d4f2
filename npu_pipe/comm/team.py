"""Team: the ranks of one pipeline, which meet, run and fail together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from npu_pipe.comm.control import Control
from npu_pipe.comm.groups import open_groups
from npu_pipe.comm.handshake import agree
from npu_pipe.errors import PeerError, RunError

__all__ = ["Team"]


class Team:
    """One rank's place among the ranks of a pipeline."""

    def __init__(
        self, rank: int, size: int, *, open_store: Callable[[], dist.Store], timeout_s: float
    ) -> None:
        """Connect all ranks; raises PeerError when one does not come."""
        self.rank = rank
        self.size = size
        self.groups = open_groups(rank, size, open_store=open_store, timeout_s=timeout_s)
        self.control = Control(self.groups)
        self._forget: list[Callable[[], None]] = [self.control.forget]

    @property
    def is_open(self) -> bool:
        return self.groups.is_open

    def on_break(self, forget: Callable[[], None]) -> None:
        """Have this called when the team breaks off: what is under way will not end."""
        self._forget.append(forget)

    def meet(self, call: str, prepare: Callable[[], Any]) -> list[Any]:
        """What `prepare` gives on each rank, on all; see `agree`."""
        if not self.is_open:
            raise RunError(
                "a pipeline is not used after it failed or was closed",
                f"{call} was called",
                "make a new one",
            )
        return agree(call, prepare, gather=self.gather)

    def gather(self, value: Any) -> list[Any]:
        """A JSON value of each rank, on every rank."""
        with self.unbroken(lambda: "meeting the other ranks"):
            return self.control.gather(value)

    @contextmanager
    def unbroken(self, at: Callable[[], str]) -> Iterator[None]:
        """What all ranks do to the end together: an error inside, of this rank or of another,
        makes this one leave, so that the ranks that wait for it notice, and learn the cause."""
        try:
            with self.control.causes():
                yield
        except PeerError:
            self._break_off()
            raise
        except BaseException as error:
            self.tell(error, f"in {at()}")
            self._break_off()
            raise

    def tell(self, error: BaseException, where: str) -> None:
        """Leave word of this rank's error for the ranks that will miss it."""
        text = f"{type(error).__name__}: {error}"
        self.control.tell_failure(f"rank {self.rank} failed {where}: {text}")

    def close(self) -> None:
        """Leave, without waiting for other ranks."""
        self.groups.close()

    def _break_off(self) -> None:
        for forget in self._forget:
            forget()
        self.close()
