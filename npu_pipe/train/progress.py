"""What a person sees while a run goes on.

On a terminal a line that moves: step, loss, tokens/s, bubble. Elsewhere (a file, CI) only the
occasional messages are printed.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from npu_pipe.timeline.timeline import Timeline

__all__ = ["ProgressLine"]


class ProgressLine:
    """A live line on a console; a quiet console shows nothing."""

    def __init__(self, console: Console, *, done: int, steps: int) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[news]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal or console.quiet,
        )
        self._task = self._progress.add_task("train", completed=done, total=steps, news="")

    def update(
        self, step: int, loss: float, tokens_per_s: float, timeline: Timeline | None
    ) -> None:
        """Show where the run stands; `timeline` is the last one measured, if any yet."""
        bubble = "" if timeline is None else f"  bubble {timeline.bubble_ratio:.1%}"
        news = f"loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s{bubble}"
        self._progress.update(self._task, completed=step, news=news)

    def say(self, message: str) -> None:
        """Print a message above the line."""
        self._console.print(message, highlight=False, soft_wrap=True, markup=False)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()
