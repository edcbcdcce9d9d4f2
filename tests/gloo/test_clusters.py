"""The configs for clusters: planned and run dry without devices, and trained when made tiny."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from npu_pipe.cli.main import main
from npu_pipe.train.job import Job, mesh_of
from npu_pipe.train.model import build_model
from npu_pipe.train.toml import read_toml, to_toml

pytestmark = pytest.mark.timeout(240)
CONFIGS = Path(__file__).parents[2] / "configs" / "clusters"
NAMES = {"llama_8b_16": (16, 8.03e9), "llama_70b_64": (64, 70.6e9), "moe_47b_32": (32, 46.7e9)}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")  # main sets it; this puts it back
    monkeypatch.chdir(tmp_path)


def test_every_config_is_one_of_those_that_are_tested() -> None:
    assert sorted(path.stem for path in CONFIGS.iterdir()) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_config_runs_dry_and_fits_its_devices(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    ranks, parameters = NAMES[name]
    job = read_toml(Job, CONFIGS / f"{name}.toml")
    assert mesh_of(job).size == ranks
    assert job.model.parameters == pytest.approx(parameters, rel=1e-3)
    assert main(["train", str(CONFIGS / f"{name}.toml"), "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert f"= {ranks} ranks, 8 a node" in out
    assert "proved: it cannot hang" in out
    assert "not measured: set [cluster]" in out
    assert " over\n" not in out
    assert out.count("\n") < 45, "one screen"
    assert list(tmp_path.iterdir()) == [], "nothing was started, nothing written"


def test_a_dry_run_in_the_ranks_of_a_launcher_is_told_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And however the flag is written, nothing is started."""
    for name, text in (("WORLD_SIZE", "16"), ("MASTER_ADDR", "node0"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, text)
    told = []
    for rank in ("0", "9"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert main(["train", str(CONFIGS / "llama_8b_16.toml"), "--dry_run"]) == 0
        told.append(capsys.readouterr().out)
    assert told[0].startswith("model ")
    assert told[1] == ""


def test_a_dry_run_of_a_job_that_has_run_tells_that_it_cannot_start_and_goes_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "runs" / "llama_8b").mkdir(parents=True)
    (tmp_path / "runs" / "llama_8b" / "config.toml").touch()
    assert main(["train", str(CONFIGS / "llama_8b_16.toml"), "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert "proved: it cannot hang" in out
    assert "runs/llama_8b is not empty; go on with --resume" in err


def test_a_dry_run_where_nothing_could_be_started_says_so_and_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a login node, in a shell of salloc."""
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_NTASKS", "16")
    assert main(["train", str(CONFIGS / "llama_8b_16.toml"), "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert "proved: it cannot hang" in out
    assert err.startswith("npu-pipe: a dry run starts nothing; training would not, here: ")
    assert "put srun before the command" in err


@pytest.mark.parametrize("name", ["llama_8b_16", "moe_47b_32"])
def test_a_config_is_planned_within_its_devices(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    config = str(CONFIGS / f"{name}.toml")
    assert main(["plan", config, "--search-s", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    job = read_toml(Job, config)
    assert (found["ranks"], found["microbatches"]) == (
        job.pipeline.ranks,
        job.pipeline.microbatches,
    )
    assert found["recommended"] in {schedule["name"] for schedule in found["schedules"]}
    assert 50e9 < found["limits"]["memory_bytes"] < job.cluster.memory_gib * 2**30


def test_plan_says_that_its_numbers_are_estimates_and_of_what(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = str(CONFIGS / "llama_8b_16.toml")
    assert main(["plan", config, "-p", "4", "-m", "8", "--search-s", "0"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Times, in us where no unit stands, and bytes are estimates" in out
    assert "300 TFLOPS x 0.5, 1600 GB/s, links 20 GB/s + 20 us" in out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--pipeline.schedule", "1f1b", "--data.sequence", "8192"],
            ["what a rank holds fits into its device", "of 64.0 GiB", "recompute = true"],
        ),
        (["--cluster.memory-gib", "40"], ["of 40.0 GiB", "rank 0 of the pipeline"]),
        (["--mesh.dp", "3"], ["data.batch 128 does not divide", "3 replicas"]),
        (["--cluster.ranks-per-node", "0"], ["cluster.ranks_per_node is from 1"]),
        (["--cluster.efficiency", "2"], ["cluster.efficiency is from 0.001 to 1"]),
        (["--model.kv-heads", "5"], ["model.heads 32 is not a multiple of model.kv_heads 5"]),
        (["--model.experts-per-token", "2"], ["model.experts_per_token is from 1 to 1"]),
        (["--pipeline.ranks", "40"], ["34 layers were given for 40 stages"]),
        (["--cluster.ranks-per-node", "5"], ["do not fill nodes of 5"]),
    ],
)
def test_what_does_not_fit_is_refused_with_a_cure_and_status_2(
    capsys: pytest.CaptureFixture[str], flags: list[str], words: list[str]
) -> None:
    assert main(["train", str(CONFIGS / "llama_8b_16.toml"), "--dry-run", *flags]) == 2
    err = capsys.readouterr().err
    assert err.startswith("npu-pipe: error: ")
    assert err.count("\n") == 1
    assert err.count("; ") >= 2
    for word in words:
        assert word in err, err


def test_streams_that_would_not_be_enough_are_found_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAMS_PER_DEVICE", "12")
    assert main(["train", str(CONFIGS / "llama_8b_16.toml"), "--dry-run"]) == 2
    assert "STREAMS_PER_DEVICE is 12" in capsys.readouterr().err


def test_a_dry_run_and_a_plan_need_no_torch() -> None:
    code = (
        "import sys; from npu_pipe.cli.main import main\n"
        f"config = {str(CONFIGS / 'llama_8b_16.toml')!r}\n"
        "assert main(['train', config, '--dry-run']) == 0\n"
        "assert main(['plan', config, '--search-s', '0']) == 0\n"
        "print('\\n', 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout.split()[-1] == "False"


def tiny(name: str, tmp_path: Path) -> Path:
    """The same job, but for its sizes."""
    job = read_toml(Job, CONFIGS / f"{name}.toml")
    model = replace(job.model, dim=32, heads=4, kv_heads=2, hidden=48, blocks=4, vocabulary=256)
    job = replace(
        job,
        model=model,
        data=replace(job.data, batch=8, sequence=16),
        pipeline=replace(job.pipeline, ranks=2, microbatches=4),
        mesh=replace(job.mesh, dp=1, tp=min(job.mesh.tp, 2)),
        run=replace(job.run, folder=tmp_path / "run", steps=4),
    )
    (tmp_path / "tiny.toml").write_text(to_toml(job))
    return tmp_path / "tiny.toml"


@pytest.mark.parametrize("name", NAMES)
def test_a_tiny_one_of_the_same_kind_computes_what_the_unsplit_model_does(
    tmp_path: Path, name: str
) -> None:
    """With grouped keys; on two ranks a stage; the one with experts, recomputed."""
    config = tiny(name, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "npu_pipe", "verify", str(config)],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_recomputed_blocks_give_the_same_gradients_bit_for_bit(tmp_path: Path) -> None:
    plain = read_toml(Job, tiny("llama_8b_16", tmp_path)).model
    ids = torch.arange(48).remainder(7).view(3, 16)
    gradients = []
    for config in (plain, replace(plain, recompute=True)):
        model = build_model(config, seed=1)
        model(ids).square().mean().backward()
        gradients.append([each.grad for each in model.parameters()])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*gradients, strict=True))


def test_every_expert_learns_from_its_own_tokens_only(tmp_path: Path) -> None:
    config = replace(read_toml(Job, tiny("moe_47b_32", tmp_path)).model, recompute=False)
    model = build_model(config, seed=1)
    experts = model[1].feed_forward
    chosen: list[torch.Tensor] = []
    experts.router.register_forward_hook(
        lambda _, __, liked: chosen.append(liked.topk(config.experts_per_token).indices)
    )
    model(torch.arange(3).view(1, 3)).square().mean().backward()
    counts = torch.bincount(chosen[0].flatten(), minlength=config.experts)
    assert int(counts.sum()) == 3 * config.experts_per_token < config.experts
    for count, expert in zip(counts, experts.experts, strict=True):
        norms = [float(each.grad.norm()) for each in expert.parameters()]
        assert (min(norms) > 0) == (int(count) > 0)
