"""Whether the network interfaces that variables name are there.

gloo    eth0,eth1           these, by their whole names; gloo fails on one that is not there
hccl    eth  =eth0  ^eth  ^=eth0     prefixes, names, and all but those; the same for nccl
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

from npu_pipe.finding import Finding, Verdict
from npu_pipe.launch.surroundings import Surroundings

__all__ = ["interface_findings", "matching"]


def interface_findings(at: Surroundings) -> Iterator[Finding]:
    """What is wrong with the variables that name interfaces or an address of this host."""
    there = at.host.interfaces
    listed = ", ".join(there) or "none"
    for name, backends in (
        ("GLOO_SOCKET_IFNAME", ("gloo", "hccl", "nccl")),  # which all use gloo for control
        ("HCCL_SOCKET_IFNAME", ("hccl",)),
        ("NCCL_SOCKET_IFNAME", ("nccl",)),
    ):
        text = at.value(name)
        if text is None:
            continue
        if name.startswith("GLOO"):
            missing = [each for each in text.split(",") if each not in there]
        else:
            missing = [] if matching(text, there) else [text]
        # Not what a job on this host alone fails on, but what one on more would.
        is_unused = name.startswith("GLOO") and at.is_alone
        if missing:
            yield Finding(
                "variables",
                f"{name}={text} names {_told(missing)}, and {at.host.name} has {listed}",
                Verdict.WARN if is_unused else at.verdict(*backends),
                f"unset {name}, or name the interface that the hosts reach each other by",
            )
    address = at.value("HCCL_IF_IP")
    if address is not None and not _is_ours(address):
        yield Finding(
            "variables",
            f"HCCL_IF_IP={address} is no address of {at.host.name}",
            at.verdict("hccl"),
            "unset HCCL_IF_IP, or set it on each host to its own address",
        )


def matching(pattern: str, interfaces: tuple[str, ...]) -> tuple[str, ...]:
    """Those that a pattern of HCCL or NCCL leaves."""
    excludes = pattern.startswith("^")
    pattern = pattern.removeprefix("^")
    is_whole = pattern.startswith("=")
    words = [word for word in pattern.removeprefix("=").split(",") if word]

    def is_named(interface: str) -> bool:
        return any(interface == w if is_whole else interface.startswith(w) for w in words)

    return tuple(each for each in interfaces if is_named(each) != excludes)


def _told(missing: list[str]) -> str:
    return f"no interface that is there: {', '.join(missing)}"


def _is_ours(address: str) -> bool:
    """Whether this host has an address: only then something can listen on it."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(place)
    except OSError:
        return False
    return True
