"""The words of an error, whoever wrote it."""

from __future__ import annotations

__all__ = ["text_of", "words_of"]


def text_of(error: BaseException) -> str:
    """Its text. One that makes none is not to keep other ranks from hearing of it."""
    try:
        return str(error)
    except Exception as second:
        return f"(its text could not be made: {type(second).__name__})"


def words_of(error: BaseException, *, longest: int = 4000) -> str:
    """Its class and its text, of which no more than `longest` characters."""
    return ": ".join(filter(None, (type(error).__name__, text_of(error)[:longest])))
