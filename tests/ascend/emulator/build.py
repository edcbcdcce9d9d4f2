"""Building stand-ins for the libraries of CANN, against the headers of a wheel of torch_npu.

libascendcl   devices, memory, streams, events, on host memory and threads     src/acl
libhccl       transfers and collectives over UNIX sockets of one host          src/hccl
libopapi      operators, computed by torch's own CPU kernels                   src/opapi
seven more    empty: they only have to be there; functions of libascendcl are found in them too
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from emulator.symbols import defined_in, needed_by, stub_source

__all__ = ["build"]

_SOURCES = Path(__file__).parent / "src"
_EMPTY = (
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
    "libascend_hal.so",
    "libms_tools_ext.so",
    "libmsprofiler.so",
)


def build(cache: Path, torch_npu: Path) -> Path:
    """The folder of the libraries in `cache`, built there unless it is from the same sources.

    torch_npu: the package of the wheel. Raises RuntimeError with what the compiler said.
    """
    made = cache / f"emulator-{_fingerprint(torch_npu)}"
    if not made.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            out = Path(scratch) / "lib"
            out.mkdir()
            _build(out, Path(scratch), torch_npu)
            shutil.move(out, made)  # complete, or not there
    return made


def _build(out: Path, scratch: Path, torch_npu: Path) -> None:
    parts = ("opapi", "acl", "hccl")  # the slowest first
    sources = [(part, path) for part in parts for path in sorted((_SOURCES / part).glob("*.cpp"))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = list(pool.map(lambda each: _compile(*each, scratch, torch_npu), sources))
    objects = {
        part: [path for (of, _), path in zip(sources, compiled, strict=True) if of == part]
        for part in parts
    }
    stubs = scratch / "stubs.c"
    stubs.write_text(stub_source(needed_by(torch_npu) - defined_in(objects["acl"])))
    _run(_compiler(), "-x", "c", "-w", "-O1", "-fPIC", "-c", stubs, "-o", scratch / "stubs.o")
    _link(out, "libascendcl.so", [*objects["acl"], scratch / "stubs.o"])
    empty = scratch / "empty.c"
    empty.write_text("typedef int npu_emu_empty;\n")
    for name in _EMPTY:  # torch_npu looks functions of libascendcl up in some of them
        _link(out, name, ["-Wl,--no-as-needed", empty, "-lascendcl"])
    _link(out, "libhccl.so", [*objects["hccl"], "-lascendcl"])
    # Torch's own libraries are loaded long before this one, so they need not be found again.
    torch_libraries = [f"-L{_torch() / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
    _link(out, "libopapi.so", [*objects["opapi"], "-lascendcl", *torch_libraries])


def _compile(part: str, source: Path, scratch: Path, torch_npu: Path) -> Path:
    target = scratch / f"{part}_{source.stem}.o"
    headers = torch_npu / "include"
    includes = [_SOURCES / "common", headers, headers / "third_party" / "acl" / "inc"]
    flags = ["-std=c++17"]
    if part == "opapi":
        torch_headers = _torch() / "include"
        api = torch_headers / "torch" / "csrc" / "api" / "include"
        flags = ["-std=c++20", f"-isystem{torch_headers}", f"-isystem{api}"]
    options = ["-O1", "-fPIC", "-Wall", *flags, *(f"-I{path}" for path in includes)]
    _run(_compiler(), "-c", source, "-o", target, *options)
    return target


def _link(out: Path, name: str, inputs: Sequence[str | Path]) -> None:
    options = ["-shared", "-o", out / name, f"-Wl,-soname,{name}"]
    _run(_compiler(), *options, *inputs, f"-L{out}", "-lpthread", "-ldl")


def _run(*command: str | Path) -> None:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"failed: {' '.join(words)}\n{done.stdout}{done.stderr}")


def _fingerprint(torch_npu: Path) -> str:
    """Of all that the libraries depend on."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for path in [*sorted(here.glob("*.py")), *sorted(_SOURCES.rglob("*.[ch]*"))]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    version = (torch_npu / "version.py").read_text()
    asked = [_compiler(), "--version"]
    compiler = subprocess.run(asked, capture_output=True, text=True, check=True)
    for text in (torch.__version__, version, compiler.stdout):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:16]


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _torch() -> Path:
    return Path(torch.__file__).parent
