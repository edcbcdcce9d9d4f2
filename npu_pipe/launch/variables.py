"""Environment variables read strictly. An empty variable counts as not set, as in torch."""

from __future__ import annotations

import ipaddress
import re
import zlib
from collections.abc import Iterable, Mapping

from npu_pipe.errors import ConfigError

__all__ = [
    "MOST",
    "TORCH_PORT",
    "check_at_most",
    "check_below",
    "check_same",
    "derived_port",
    "first_set",
    "host_name",
    "is_set",
    "is_whole",
    "listed",
    "port_number",
    "require",
    "whole_number",
]

MOST = 2**31 - 1
_MOST_DIGITS = 18
TORCH_PORT = 29500  # what torch takes where no port is given
_NAME = re.compile(r"\w[\w.-]{0,252}", re.ASCII)
_PORTS = range(15000, 30000)  # below the ports that Linux and HCCL give out by themselves


def is_set(environ: Mapping[str, str], name: str) -> bool:
    """True if `name` is there and not empty."""
    return bool(environ.get(name))


def is_whole(text: str) -> bool:
    """Whether `text` is a whole number as programs of C read it, and of a size to be met: Python
    takes other digits too, and none of more than 4300."""
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


def first_set(environ: Mapping[str, str], names: Iterable[str]) -> str | None:
    """The first of `names` that is set."""
    return next((name for name in names if is_set(environ, name)), None)


def require(environ: Mapping[str, str], names: Iterable[str], *, cure: str) -> None:
    """Raise ConfigError that names what is set and what is missing, unless all are set."""
    names = tuple(names)
    missing = [name for name in names if not is_set(environ, name)]
    if missing:
        there = [name for name in names if is_set(environ, name)]
        raise ConfigError(
            f"{listed(names)} are set together",
            f"{listed(there) or 'none'} set, {listed(missing)} missing",
            cure,
        )


def whole_number(
    environ: Mapping[str, str], name: str, *, least: int = 0, most: int = MOST, cure: str
) -> int:
    """The value of `name`, from `least` to `most`. Raises ConfigError."""
    text = environ[name]
    if not (is_whole(text) and least <= int(text) <= most):
        raise ConfigError(
            f"{name} is a whole number from {least} to {most}", f"{name} is {text!r:.40}", cure
        )
    return int(text)


def port_number(environ: Mapping[str, str], name: str, *, cure: str) -> int:
    """The value of `name`, a port to listen on. Raises ConfigError."""
    return whole_number(environ, name, least=1, most=2**16 - 1, cure=cure)


def host_name(environ: Mapping[str, str], name: str) -> str:
    """The value of `name`, a host's name or its address. Raises ConfigError."""
    text = environ[name]
    if not (_NAME.fullmatch(text) or _is_address(text)):
        raise ConfigError(
            f"{name} is the name of a host, or its address, and nothing else",
            f"{name} is {text!r:.60}",
            "give it as in node0, 10.0.0.1 or fd00::1; the port has a variable of its own",
        )
    return text


def check_below(environ: Mapping[str, str], index: str, bound: str, *, cure: str) -> None:
    """Raise ConfigError that names both, unless `index` counts from 0 below `bound`."""
    if int(environ[index]) >= int(environ[bound]):
        raise _contradiction(environ, index, bound, "is less than", cure)


def check_at_most(environ: Mapping[str, str], name: str, most: str, *, cure: str) -> None:
    """Raise ConfigError that names both, if `name` is larger than `most`."""
    if int(environ[name]) > int(environ[most]):
        raise _contradiction(environ, name, most, "is at most", cure)


def check_same(environ: Mapping[str, str], name: str, other: str, *, cure: str) -> None:
    """Raise ConfigError that names both, if `other` is set to anything but what `name` is."""
    if is_set(environ, other) and environ[other] != environ[name]:
        raise _contradiction(environ, name, other, "is the same as", cure)


def derived_port(job: str) -> int:
    """A port that all ranks of a job find alike, and that another job hardly ever has.

    job: what names the job on its machine.
    """
    return _PORTS[zlib.crc32(job.encode(errors="surrogateescape")) % len(_PORTS)]


def listed(names: Iterable[str]) -> str:
    """One, two and three."""
    *most, last = list(names) or [""]
    return f"{', '.join(most)} and {last}" if most else last


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return text.isprintable()


def _contradiction(
    environ: Mapping[str, str], name: str, other: str, relation: str, cure: str
) -> ConfigError:
    facts = (f"{each} is {_shown(environ[each])}" for each in (name, other))
    return ConfigError(f"{name} {relation} {other}", ", ".join(facts), cure)


def _shown(text: str) -> str:
    return text if is_whole(text) else f"{text!r:.40}"
