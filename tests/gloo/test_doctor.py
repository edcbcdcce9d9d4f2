"""npu-pipe doctor: one process that starts ranks, or the ranks of a launcher; one answer."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_train_command import SMALL

from npu_pipe.cli.main import main
from npu_pipe.device.inventory import device_findings, pairing_findings
from npu_pipe.device.versions import versions_here
from npu_pipe.finding import Verdict, may_start

pytestmark = pytest.mark.timeout(180)
DOCTOR = [sys.executable, "-m", "npu_pipe", "doctor"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(SMALL)
    return tmp_path


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: text for name, text in os.environ.items() if not name.startswith("OMP_")}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env={**kept, **variables},
    )


def document(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1, f"rank 0 prints once: {done.stdout}\n{done.stderr}"
    found: dict[str, Any] = json.loads(lines[0])
    return found


def named(found: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [finding for finding in found["findings"] if finding["name"] == name]


def test_of_a_job_it_starts_the_ranks_and_tries_every_pair_of_neighbours(here: Path) -> None:
    done = run(*DOCTOR, "job.toml", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = document(done)
    assert found["may_start"]
    assert found["launcher"]["name"] == "one process"
    assert [(link["low"], link["high"]) for link in found["links"]] == [(0, 1)]
    (link,) = found["links"]
    assert link["is_correct"]
    assert link["is_near"]
    assert link["latency_us"] > 0
    assert min(link["down_gb_s"], link["up_gb_s"], link["both_gb_s"]) > 0
    assert [rank["device"] for rank in found["ranks"]] == ["cpu", "cpu"]
    assert [rank["stages"] for rank in found["mesh"]["ranks"]] == [[0], [1]]
    names = {finding["name"] for finding in found["findings"]}
    assert names == {
        *("launcher", "mesh", "versions", "devices", "memory", "ports", "variables", "clocks"),
        "transfers",
    }
    assert [path.name for path in here.iterdir()] == ["job.toml"], "it leaves nothing behind"


def test_it_fits_on_one_screen_and_says_whether_training_may_start(here: Path) -> None:
    done = run(*DOCTOR, "--ranks", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") <= 30
    assert max(map(len, done.stdout.splitlines())) <= 110
    assert done.stdout.splitlines()[-1].startswith("training may start")


def test_under_torchrun_every_rank_looks_and_the_first_one_tells_once(here: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = run(
        *(*torchrun, "--nproc-per-node", "2", "-m", "npu_pipe", "doctor", "job.toml", "--json"),
        OMP_NUM_THREADS="1",
        ASCEND_LAUNCH_BLOCKING="1",
    )
    assert done.returncode == 0, done.stderr
    found = document(done)
    assert found["launcher"]["name"] == "torchrun"
    assert found["launcher"]["sources"]["rank"] == "RANK"
    listed, blocking = named(found, "variables")
    assert listed["facts"] == "OMP_NUM_THREADS=1, ASCEND_LAUNCH_BLOCKING=1"
    assert (blocking["verdict"], blocking["ranks"]) == ("warn", [0, 1])
    assert len(found["links"]) == 1


def test_what_is_wrong_is_told_before_anything_could_hang_with_status_1(here: Path) -> None:
    wrong = {"GLOO_SOCKET_IFNAME": "eth9", "HCCL_EXEC_TIMEOUT": "100"}
    done = run(*DOCTOR, "job.toml", "--device", "npu", **wrong)
    assert (done.returncode, done.stderr) == (1, "")
    text = " ".join(done.stdout.split())
    assert "GLOO_SOCKET_IFNAME=eth9 names no interface" in text
    assert "HCCL_CONNECT_TIMEOUT < HCCL_EXEC_TIMEOUT < HCCL_EVENT_TIMEOUT" in text
    assert "! transfers not tried" in text
    assert text.endswith("training may not start: 1 problem, 3 warnings")


def test_what_ranks_on_this_host_do_not_use_keeps_nothing_from_starting(here: Path) -> None:
    done = run(*DOCTOR, "job.toml", GLOO_SOCKET_IFNAME="eth9")
    assert (done.returncode, done.stderr) == (0, "")
    assert "! variables GLOO_SOCKET_IFNAME=eth9" in " ".join(done.stdout.split())


def test_a_launcher_with_a_variable_missing_is_a_problem_that_names_it(here: Path) -> None:
    done = run(*DOCTOR, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    assert (done.returncode, done.stderr) == (1, "")
    text = " ".join(done.stdout.split())
    assert "x launcher" in text
    assert "MASTER_PORT" in text


def test_a_kind_of_device_that_is_not_here_is_a_problem(here: Path) -> None:
    found = run(*DOCTOR, "--device", "npu", "--json")
    assert found.returncode == 1
    (devices,) = named(document(found), "devices")
    assert devices["verdict"] == "refuse"
    assert "torch_npu is not installed" in devices["facts"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["missing.toml"], "missing.toml: No such file or directory"),
        (["job.toml", "--ranks", "3"], "start 2, or give another job file"),
        (["--ranks", "0"], "ranks is from 1"),
        (["--device", "tpu"], "devices are auto"),
        (["--ranks", "2", "--port", "70000"], "port 70000"),
    ],
)
def test_a_mistake_of_the_command_line_is_one_message_with_status_2(
    here: Path, flags: list[str], words: str
) -> None:
    done = run(*DOCTOR, *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert words in done.stderr


@pytest.mark.parametrize(("flags", "words"), [(["missing.toml"], "No such file"), (["--no"], "")])
def test_with_json_a_mistake_is_a_document_too(here: Path, flags: list[str], words: str) -> None:
    done = run(*DOCTOR, "--json", *flags)
    assert done.returncode == 2
    found = document(done)
    assert not found["may_start"]
    assert words in found["findings"][0]["facts"]
    assert found["findings"][0]["facts"]
    assert done.stderr


def test_a_torch_that_does_not_load_is_told_by_every_rank(here: Path) -> None:
    (here / "torch").mkdir()
    (here / "torch" / "__init__.py").write_text(
        "raise ImportError('libtorch_cpu.so: no such file')"
    )
    rank = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for variables in ({}, {**rank, "RANK": "0", "LOCAL_RANK": "0"}):
        done = run(*DOCTOR, "--json", PYTHONPATH=str(here), **variables)
        assert done.returncode == 2
        (finding,) = document(done)["findings"]
        assert "torch loads; libtorch_cpu.so: no such file (python 3" in finding["facts"]
        assert finding["cure"].startswith("install it again")
    done = run(*DOCTOR, "--json", PYTHONPATH=str(here), **rank, RANK="1", LOCAL_RANK="1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("rank 1: torch loads; libtorch_cpu.so"), (
        "rank 0 may not hear of it"
    )


def test_a_launcher_that_ends_all_ranks_gets_a_document_before(here: Path) -> None:
    """As torchrun, which sends SIGTERM as soon as any rank has ended."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    process = subprocess.Popen(
        [*DOCTOR, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **alone, "MASTER_PORT": port},
    )
    wait_until_listening(int(port))
    process.terminate()
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM, stderr
    found = json.loads(stdout)
    assert not found["may_start"]
    assert found["findings"][0]["facts"] == "it ended with status 143"


def wait_until_listening(port: int) -> None:
    """As rank 0 does that waits for the others."""
    for _ in range(2400):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError("nobody listens")


def test_a_program_that_asks_has_its_signals_back(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ranks that it started afterwards could not be ended: they had SIGTERM ignored."""
    before = signal.getsignal(signal.SIGTERM)
    assert main(["doctor", "--json"]) in (0, 1)
    assert json.loads(capfd.readouterr().out)["format"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_ranks_that_end_are_a_problem_with_their_cause(here: Path) -> None:
    """As where a rank is killed for want of memory."""
    code = (
        "import npu_pipe.comm.team as t, os, signal, sys, npu_pipe.doctor.rank as r\n"
        "t.Team.gather = lambda *a: os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.exit(r.main(sys.argv[1:]))"
    )
    wrapper = here / "wrapper.py"
    wrapper.write_text(
        "import sys, npu_pipe.cli.doctor as d\n"
        f"d.command_of = lambda *a, **k: ['-c', {code!r}, *d_command(*a, **k)[2:]]\n".replace(
            "d_command", "__import__('npu_pipe.doctor.rank', fromlist=['x']).command_of"
        )
        + "sys.exit(d.run(['--ranks', '2']))\n"
    )
    done = run(sys.executable, str(wrapper))
    assert done.returncode == 1
    text = " ".join(done.stdout.split())
    assert "x transfers" in text
    assert "was killed by SIGKILL" in text


def test_versions_that_do_not_pair_are_found_by_what_is_wanted() -> None:
    here = versions_here(())
    apart = {
        "old": here.__class__(**{**_fields(here), "torch_npu": "2.1.0", "cann": "8.3.RC1"}),
        "driver": here.__class__(**{**_fields(here), "npu_driver": "25.0.rc1"}),
    }
    assert [each.verdict for each in pairing_findings(here, wanted="auto")] == [Verdict.OK]
    for name, versions in apart.items():
        _, found = pairing_findings(versions, wanted="auto")
        assert found.verdict is Verdict.WARN, name
        assert found.cure
        assert not may_start(pairing_findings(versions, wanted="npu"))
    _, cuda = pairing_findings(
        here.__class__(**{**_fields(here), "cuda_driver": "580.65", "cuda": None}), wanted="cuda"
    )
    assert cuda.verdict is Verdict.REFUSE
    assert "built without CUDA" in cuda.facts


def test_the_cpu_is_always_there_and_says_why_it_is_taken() -> None:
    (found,) = device_findings("auto", local_ranks=4)
    assert found.verdict is Verdict.OK
    assert found.facts.startswith("cpu: no npu: ")
    (asked,) = device_findings("cpu", local_ranks=4)
    assert asked.facts == "cpu"


def _fields(versions: Any) -> dict[str, str | None]:
    return {name: getattr(versions, name) for name in versions.__slots__}
