"""Which functions of CANN a wheel of torch_npu needs, and stubs for those nobody wrote."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

__all__ = ["defined_in", "needed_by", "stub_source"]

# Functions of CANN, among the symbols of torch, Python and libc that the wheel leaves undefined.
_CANN = re.compile(r"^(acl[A-Za-z]|rt[A-Z]|Msprof|Hccl|Ge[A-Z])")

# Functions on whose effect nothing depends: reports of the profiler, dumps, descriptors of the
# old path of operators, which is refused when an operator runs. A stub of any other one fails.
_HARMLESS = re.compile(
    r"^(Msprof|aclmdl(Init|Set|Finalize)Dump|aclop(Create|Destroy|Set)Attr|aclCreate|aclDestroy"
    r"|aclSetTensor|aclGetTensorDesc)"
)


def needed_by(torch_npu: Path) -> set[str]:
    """The functions of CANN that the libraries of this package leave undefined."""
    libraries = [
        *torch_npu.glob("_C*.so"),
        *(torch_npu / "lib" / f"lib{name}.so" for name in ("torch_npu", "tensorpipe")),
        torch_npu / "lib" / "libnpu_profiler.so",
    ]
    found = set()
    for library in libraries:
        if library.exists():
            pairs = [line.split()[-2:] for line in _nm("-D", "--undefined-only", library)]
            found |= {name.split("@")[0] for kind, name in pairs if kind == "U"}
    return {name for name in found if _CANN.match(name)}


def defined_in(objects: Iterable[Path]) -> set[str]:
    """The functions that are defined in object files, all of them extern "C"."""
    return {
        line.split()[-1] for path in objects for line in _nm("--defined-only", "-g", path) if line
    }


def stub_source(names: Iterable[str]) -> str:
    """C source of functions that do nothing, or say that they are not there."""
    lines = ["int npu_emu_unsupported(const char* function);"]
    for name in sorted(names):
        harmless = _HARMLESS.match(name) is not None
        body = "return 0;" if harmless else f'return npu_emu_unsupported("{name}");'
        lines.append(f"long {name}() {{ {body} }}")
    return "\n".join(lines) + "\n"


def _nm(*arguments: str | Path) -> list[str]:
    command = ["nm", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
