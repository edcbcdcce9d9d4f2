"""npu-pipe script: it writes good bash, starts the right ranks, and its settings are sound."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from npu_pipe.cli.main import main
from npu_pipe.comm.preflight import check_needs, needs
from npu_pipe.launch.preflight import hccl_settings

JOB = """
[model]
dim = 16
blocks = 6
heads = 2
hidden = 16
[data]
batch = 32
sequence = 16
validation_fraction = 0.01
[pipeline]
schedule = "1f1b"
ranks = 8
microbatches = 4
[mesh]
dp = 2
[run]
folder = "runs/it's mine"
"""

LAUNCHERS = ["msrun", "torchrun", "slurm"]
STANDS_IN_FOR = {"msrun": "msrun", "torchrun": "torchrun", "slurm": "srun"}

# Stands in for a launcher: writes down what it was called with, and fails as often as it is told.
STUB = """#!/usr/bin/env bash
python3 - "$@" <<'EOF'
import json, os, sys
with open("calls", "a") as file:
    file.write(json.dumps({"args": sys.argv[1:], "environ": dict(os.environ)}) + "\\n")
EOF
exit "$(sed -n "$(wc -l < calls)p" statuses)"
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)
    return tmp_path


def script(launcher: str, *flags: str) -> Path:
    assert main(["script", "job.toml", "--launcher", launcher, "--output", "run.sh", *flags]) == 0
    return Path("run.sh")


def call(here: Path, *, statuses: list[int], **environ: str) -> tuple[int, list[dict[str, object]]]:
    """Run the script with stand-ins for all launchers: its status, and their calls."""
    tools = here / "tools"
    tools.mkdir(exist_ok=True)
    for name in ("msrun", "torchrun", "srun", "scontrol"):
        (tools / name).write_text(STUB)
        (tools / name).chmod(0o755)
    (here / "statuses").write_text("".join(f"{status}\n" for status in [*statuses, 0, 0]))
    (here / "set_env.sh").write_text('export FROM_CANN="$NOT_SET_ANYWHERE"yes\n')
    kept = {"PATH": f"{tools}:{os.environ['PATH']}", "CANN_SET_ENV": str(here / "set_env.sh")}
    done = subprocess.run(
        ["bash", "run.sh"], env={**kept, **environ}, capture_output=True, text=True, check=False
    )
    lines = (here / "calls").read_text().splitlines() if (here / "calls").exists() else []
    return done.returncode, [json.loads(line) for line in lines]


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("target", ["npu", "cuda", "cpu"])
@pytest.mark.parametrize("per_node", ["8", "16", "4"])
def test_it_is_good_bash_and_every_setting_is_explained(
    here: Path, launcher: str, target: str, per_node: str
) -> None:
    path = script(launcher, "--target", target, "--per-node", per_node)
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
    checker = shutil.which("shellcheck")
    if checker is not None:
        found = subprocess.run([checker, path], capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout
    lines = path.read_text().splitlines()
    assert max(map(len, lines)) <= 100
    for above, line in pairwise(lines):
        assert not line.startswith("export") or above.startswith("# "), line
        assert above or line, "no two empty lines"


@pytest.mark.parametrize(
    ("launcher", "words"),
    [
        ("msrun", ["--worker_num=16", "--local_worker_num=8", "--master_addr=node0"]),
        ("msrun", ["--master_port=29500", "--node_rank=1", "--join=True", "python", "-m"]),
        ("torchrun", ["--nnodes=2", "--nproc-per-node=8", "--rdzv-backend=c10d"]),
        ("torchrun", ["--rdzv-endpoint=node0:29500", "--max-restarts=3", "-m", "npu_pipe"]),
        ("slurm", ["--kill-on-bad-exit=1", "python", "-m", "npu_pipe", "train", "job.toml"]),
    ],
)
def test_the_launcher_is_called_with_what_the_job_needs(
    here: Path, launcher: str, words: list[str]
) -> None:
    script(launcher)
    status, (started,) = call(here, statuses=[0], MASTER_ADDR="node0", NODE_RANK="1")
    assert status == 0
    assert [word for word in started["args"] if word in words] == words
    assert started["args"][-2:] == ["train", "job.toml"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_settings_reach_the_ranks_and_pass_the_checks_before_the_start(
    here: Path, launcher: str
) -> None:
    script(launcher)
    _, (started,) = call(here, statuses=[0], MASTER_ADDR="node0", NODE_RANK="0")
    environ = started["environ"]
    assert environ["FROM_CANN"] == "yes"
    settings = hccl_settings(environ=environ)
    assert settings.connect_s < settings.exec_s < settings.event_s
    check_needs(needs([], settings, ranks=8), settings, local_rank=7, is_free=lambda _: True)
    for name in ("TASK_QUEUE_ENABLE", "PYTORCH_NPU_ALLOC_CONF", "OMP_NUM_THREADS"):
        assert environ[name]
    assert environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"


def test_what_the_user_has_set_stays(here: Path) -> None:
    script("msrun")
    own = {"HCCL_CONNECT_TIMEOUT": "77", "MASTER_PORT": "1234", "ASCEND_TOOLKIT_HOME": "/cann"}
    _, (started,) = call(here, statuses=[0], MASTER_ADDR="node0", NODE_RANK="0", **own)
    assert started["environ"]["HCCL_CONNECT_TIMEOUT"] == "77"
    assert "--master_port=1234" in started["args"]
    assert "FROM_CANN" not in started["environ"], "CANN was there already"


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_run_that_was_begun_goes_on(here: Path, launcher: str) -> None:
    script(launcher)
    (here / "runs/it's mine").mkdir(parents=True)
    (here / "runs/it's mine/config.toml").write_text("")
    _, (started,) = call(here, statuses=[0], MASTER_ADDR="node0", NODE_RANK="0")
    assert started["args"][-1] == "--resume"


def test_msrun_is_started_anew_after_a_failure_and_not_for_ever(here: Path) -> None:
    script("msrun", "--max-restarts", "2")
    status, calls = call(here, statuses=[1, 9], MASTER_ADDR="node0", NODE_RANK="0")
    assert (status, len(calls)) == (0, 3)
    (here / "calls").unlink()
    status, calls = call(here, statuses=[1, 1, 7, 0], MASTER_ADDR="node0", NODE_RANK="0")
    assert (status, len(calls)) == (7, 3)


@pytest.mark.parametrize(
    ("failure", "before", "requeued"), [(1, "0", True), (1, "3", False), (2, "0", False)]
)
def test_slurm_queues_a_failed_job_again_unless_it_is_a_mistake(
    here: Path, failure: int, before: str, requeued: bool
) -> None:
    script("slurm")
    status, calls = call(here, statuses=[failure], SLURM_RESTART_COUNT=before, SLURM_JOB_ID="42")
    assert status == failure
    assert [each["args"] for each in calls[1:]] == ([["requeue", "42"]] if requeued else [])


@pytest.mark.parametrize(
    ("launcher", "environ"),
    [("msrun", {"NODE_RANK": "0"}), ("msrun", {"MASTER_ADDR": "a"}), ("torchrun", {})],
)
def test_what_only_the_user_knows_is_asked_for(
    here: Path, launcher: str, environ: dict[str, str]
) -> None:
    script(launcher)
    status, calls = call(here, statuses=[0], **environ)
    assert status != 0
    assert calls == []


def test_flags_of_train_decide_the_mesh_and_are_handed_on(here: Path) -> None:
    script("msrun", "--", "--mesh.dp", "1", "--run.folder", "a b")
    text = Path("run.sh").read_text()
    assert "dp 1 x pp 8 x tp 1 = 8 ranks on 1 node of 8" in text
    assert "train job.toml --mesh.dp 1 --run.folder 'a b'" in text
    assert "[ -f 'a b/config.toml' ]" in text


@pytest.mark.parametrize(
    "name", ["-job.toml", 'it\'s "my" $job.toml', "two\nlines.toml", "j\u00f6b.toml"]
)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_file_may_have_any_name(here: Path, launcher: str, name: str) -> None:
    (here / "job.toml").rename(here / name)
    flags = ["--launcher", launcher, "--output", "run.sh"]
    assert main(["script", f"./{name}", *flags]) == 0
    _, (started,) = call(here, statuses=[0], MASTER_ADDR="node0", NODE_RANK="0")
    assert isinstance(started["args"], list)
    assert Path(started["args"][-1]) == Path(name)
    assert not started["args"][-1].startswith("-")


def test_a_name_that_is_no_text_is_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "job.toml").rename(here / "\udcff.toml")
    assert main(["script", "\udcff.toml", "--launcher", "msrun"]) == 2
    assert "a script is UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--per-node", "3"], "do not fill nodes of 3"),
        (["--per-node", "0"], "all nodes have the same number of ranks"),
        (["--port", "70000"], "port is from 1 to 65535; it is 70000"),
        (["--max-restarts", "-1"], "max-restarts is from 0 to 1000"),
        (["--", "--data.batch", "3"], "data.batch 3 does not divide"),
    ],
)
def test_a_mistake_is_one_message_with_status_2(
    here: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert main(["script", "job.toml", "--launcher", "msrun", *flags]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err


def test_an_unknown_launcher_is_refused_with_those_that_there_are(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["script", "job.toml", "--launcher", "msrum"]) == 2
    assert "torchrun" in capsys.readouterr().err
