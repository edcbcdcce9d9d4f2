"""The end of a script that never says so."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable

from npu_pipe.pipeline import Pipeline

__all__ = ["closed_at_exit"]


def closed_at_exit(pipeline: Pipeline) -> Callable[[], None]:
    """What closes it, at the latest when the script ends. The ranks that go on are told of the
    exception that ends it, if any."""

    def close() -> None:
        atexit.unregister(close)
        error = getattr(sys, "last_value", None)
        pipeline.__exit__(None if error is None else type(error), error, None)

    atexit.register(close)  # the last to be registered, before what the pipeline has is closed
    return close
