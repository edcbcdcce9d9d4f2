"""The script of docs/tensor_parallel.md runs, and learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "tensor_parallel.md"


@pytest.mark.timeout(150)
def test_the_pages_script_learns_under_torchrun(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
    (tmp_path / "sharded.py").write_text(code)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node", "4", "sharded.py"),
        ],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    loss, *rows = done.stdout.splitlines()
    assert float(loss.removeprefix("loss ")) < 3.0, "it began at log 64 = 4.2"
    assert rows
    assert all(" | portable | not npu: " in row for row in rows)
