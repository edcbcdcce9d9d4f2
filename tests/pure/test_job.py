"""A job comes from its file and flags, goes back to a file, and is refused with a cure."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_pipe.cli import job_command, train
from npu_pipe.cli.job_command import read_command
from npu_pipe.cli.train import TrainCommand
from npu_pipe.errors import ConfigError, DataError, PartitionError, ScheduleError, UsageError
from npu_pipe.ir.files import save_schedule
from npu_pipe.schedules.registry import build_schedule
from npu_pipe.train.data import DataConfig, load_corpus
from npu_pipe.train.job import Job, check_job, identity, plan_of
from npu_pipe.train.model_config import ModelConfig, layer_flops
from npu_pipe.train.optimizer import OptimizerConfig
from npu_pipe.train.plan import PipelineConfig
from npu_pipe.train.run_folder import RunConfig
from npu_pipe.train.toml import flatten, read_toml, to_toml

GPT_TINY = Path(__file__).parents[2] / "configs" / "gpt_tiny.toml"


def parse_train(args: list[str]) -> TrainCommand:
    return read_command(TrainCommand, args, verb="train")


def written(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_an_empty_file_is_the_default_job(tmp_path: Path) -> None:
    assert read_toml(Job, written(tmp_path, "")) == Job()


def test_every_value_of_the_file_arrives(tmp_path: Path) -> None:
    text = '[model]\ndim = 64\n[data]\npath = "a.txt"\n[optimizer]\nlearning_rate = 1\n'
    job = read_toml(Job, written(tmp_path, text))
    assert job.model.dim == 64
    assert job.data.path == Path("a.txt")
    assert job.optimizer.learning_rate == 1.0
    assert type(job.optimizer.learning_rate) is float


numbers = st.floats(allow_nan=False)
jobs = st.builds(
    Job,
    model=st.builds(ModelConfig, dim=st.integers(), heads=st.integers(1, 9)),
    data=st.builds(
        DataConfig,
        path=st.none() | st.text(st.characters(exclude_categories=["Cs"]), min_size=1).map(Path),
        validation_fraction=numbers,
    ),
    pipeline=st.builds(PipelineConfig, schedule=st.text(), chunks=st.none() | st.integers(1, 9)),
    optimizer=st.builds(OptimizerConfig, learning_rate=numbers, epsilon=numbers),
    run=st.builds(RunConfig, steps=st.integers(), seed=st.integers(0)),
)


@given(jobs)
def test_a_job_written_as_toml_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, job: Job
) -> None:
    path = tmp_path_factory.mktemp("job") / "job.toml"
    path.write_text(to_toml(job), encoding="utf-8", newline="")
    assert read_toml(Job, path) == job


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[model]\ndimm = 3", ["'model.dimm'", "did you mean 'model.dim'?"]),
        ("[modle]\ndim = 3", ["'modle'", "did you mean 'model'?"]),
        ("[data]\nsteps = 3", ["'data.steps'", "did you mean 'run.steps'?"]),
        ("[model]\nzzzzzz = 3", ["'model.zzzzzz'", "take it out"]),
        ('[model]\ndim = "64"', ["model.dim is a whole number", "'64', a string"]),
        ("[model]\ndim = 64.0", ["model.dim is a whole number", "64.0, a number"]),
        ("[model]\ndim = true", ["model.dim is a whole number", "True, true or false"]),
        ("[optimizer]\nfloor = [1]", ["optimizer.floor is a number", "[1], a list"]),
        ("[data]\npath = 3", ["data.path is a string (a path)", "3, a whole number"]),
        ("model = 3", ["model is a table", "3, a whole number"]),
        ("[model\ndim = 1", ["TOML", "line 1"]),
        ("[model]\ndim = 1\ndim = 2\nheads = 3", ["TOML", "line 3"]),
    ],
)
def test_a_wrong_file_is_refused_with_file_key_and_cure(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_toml(Job, path)
    assert all(word in str(caught.value) for word in [str(path), *words]), str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml: No such file"):
        read_toml(Job, tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_toml(Job, tmp_path)


def test_flags_override_the_file() -> None:
    flags = ["--resume", "--model.dim", "64", "--run.folder", "elsewhere", "--nproc", "2"]
    command = parse_train([str(GPT_TINY), *flags])
    there = read_toml(Job, GPT_TINY)
    assert command.resume
    assert command.job == replace(
        there,
        model=replace(there.model, dim=64),
        pipeline=replace(there.pipeline, ranks=2),
        run=replace(there.run, folder=Path("elsewhere")),
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model.dimm", "64"], ["--model.dimm", "--model.dim INT"]),
        (["--model.dim", "x"], ["--model.dim", "'x'"]),
    ],
)
def test_a_wrong_flag_ends_with_status_2_and_says_what_was_meant(
    flags: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_train([str(GPT_TINY), *flags])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said


def small(**parts: object) -> Job:
    return replace(Job(), **parts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("job", "kind", "words"),
    [
        (small(model=ModelConfig(dim=100, heads=3)), ConfigError, "use model.dim = 102"),
        (
            small(model=ModelConfig(blocks=0)),
            ConfigError,
            "model.blocks is from 1 to 4096; it is 0",
        ),
        (small(model=ModelConfig(blocks=1)), PartitionError, "3 layers were given for 4 stages"),
        (small(model=ModelConfig(vocabulary=255)), ConfigError, "model.vocabulary"),
        (small(data=DataConfig(batch=30)), ConfigError, "use data.batch = 24 or 32"),
        (small(data=DataConfig(batch=3)), ConfigError, "use data.batch = 8, or"),
        (small(data=DataConfig(sequence=0)), ConfigError, "data.sequence is from 1 to"),
        (small(data=DataConfig(validation_fraction=1.5)), ConfigError, "from 0 to 0.5"),
        (small(data=DataConfig(path=Path("no/such"))), DataError, "no/such: No such file"),
        (small(data=DataConfig(sequence=10**9)), DataError, "give a longer text"),
        (small(pipeline=PipelineConfig(schedule="1f1")), ScheduleError, "did you mean '1f1b'"),
        (small(pipeline=PipelineConfig(ranks=0)), ScheduleError, "ranks is a whole number"),
        (small(pipeline=PipelineConfig(chunks=2)), ScheduleError, "2 were asked for"),
        (small(pipeline=PipelineConfig(timeout_s=0)), ConfigError, "pipeline.timeout_s"),
        (small(pipeline=PipelineConfig(prefetch=0)), ConfigError, "pipeline.prefetch"),
        (
            small(pipeline=PipelineConfig("interleaved-1f1b", ranks=4, microbatches=9)),
            ScheduleError,
            "9 microbatches on 4 ranks",
        ),
        (small(optimizer=OptimizerConfig(beta1=1.0)), ConfigError, "optimizer.beta1"),
        (small(optimizer=OptimizerConfig(learning_rate=float("nan"))), ConfigError, "nan"),
        (small(run=RunConfig(steps=0)), ConfigError, "run.steps is at least 1; it is 0"),
        (small(run=RunConfig(checkpoint_every=0)), ConfigError, "run.checkpoint_every"),
        (small(run=RunConfig(seed=-1)), ConfigError, "run.seed"),
    ],
)
def test_what_cannot_run_is_refused_before_it_starts(
    job: Job, kind: type[UsageError], words: str
) -> None:
    with pytest.raises(kind) as caught:
        check_job(job)
    assert words in str(caught.value)


def test_gpt_tiny_is_what_it_says() -> None:
    job = read_toml(Job, GPT_TINY)
    check_job(job)
    assert 1.6e6 < job.model.parameters < 1.8e6
    assert (job.data.batch, job.data.sequence, job.pipeline.ranks) == (32, 128, 4)
    assert [len(layers) for layers in plan_of(job).layers] == [3, 2, 2, 3]


@pytest.mark.parametrize("ending", ["json", "csv"])
def test_a_job_takes_a_schedule_from_a_file_of_its_own_sizes(tmp_path: Path, ending: str) -> None:
    """As `npu-pipe plan --save` writes it."""
    job = read_toml(Job, GPT_TINY)
    schedule = build_schedule("zb-v", ranks=4, microbatches=8)
    path = tmp_path / f"best.{ending}"
    save_schedule(schedule, path)
    from_file = replace(job, pipeline=replace(job.pipeline, schedule=str(path)))
    check_job(from_file)
    assert plan_of(from_file).schedule.orders == schedule.orders
    assert len(plan_of(from_file).layers) == 8
    for other in ({"microbatches": 4}, {"ranks": 2}, {"chunks": 2}):
        with pytest.raises(
            ScheduleError, match="has 4 ranks and 8 microbatches; pipeline"
        ) as caught:
            plan_of(replace(from_file, pipeline=replace(from_file.pipeline, **other)))
        assert "give --pipeline.ranks 4 --pipeline.microbatches 8" in str(caught.value)


def test_layers_cost_what_their_matrices_do() -> None:
    config = ModelConfig(dim=4, blocks=2, heads=1, hidden=8)
    embedding, block, same, head = layer_flops(config, 10)
    assert embedding < block == same
    assert block == 2 * (4 * 16 + 3 * 32) + 4 * 4 * 5
    assert head == 2 * 4 * 256


def test_what_decides_the_numbers_is_in_the_identity_and_nothing_else() -> None:
    job = Job()
    corpus = load_corpus(job.data)
    base = identity(job, corpus)
    longer = replace(job, run=replace(job.run, steps=999, folder=Path("x"), validate_every=1))
    assert identity(longer, corpus) == base
    other = replace(job, run=replace(job.run, seed=1), model=replace(job.model, hidden=64))
    changed = {key for key, value in identity(other, corpus).items() if base[key] != value}
    assert changed == {"run.seed", "model.hidden"}
    assert base.keys() >= {key for key in flatten(job) if key.startswith(("model.", "optim"))}


def test_the_whole_way_to_a_checked_job_imports_no_torch() -> None:
    code = (
        "import sys; from npu_pipe.cli.train import TrainCommand;"
        "from npu_pipe.cli.job_command import read_command;"
        "from npu_pipe.train.start import check_start;"
        "command = read_command(TrainCommand, sys.argv[1:], verb='train');"
        "check_start(command.job, resume=False); assert 'torch' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(GPT_TINY), "--run.folder", "no/such/folder"]
    subprocess.run(command, check=True, timeout=60)


@pytest.mark.parametrize(("path", "options"), [("", []), ("/elsewhere", ["-P"])])
def test_ranks_look_for_modules_where_their_parent_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, options: list[str]
) -> None:
    """A queue.py in the user's folder stood in for Python's, in the ranks alone."""
    started: list[list[str]] = []

    def run_local(command: list[str], **_: object) -> int:
        started.append(command)
        return 0

    monkeypatch.setattr(job_command, "run_local", run_local)
    monkeypatch.setattr(sys, "path", [path, *filter(None, sys.path)])
    monkeypatch.chdir(tmp_path)
    assert train.run([str(GPT_TINY)]) == 0
    assert started == [[sys.executable, *options, "-m", "npu_pipe", "train", str(GPT_TINY)]]


def test_a_command_in_a_folder_that_is_gone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch ended each rank with a message about a library."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError, match="a folder that is there"):
        train.run([str(GPT_TINY), "--run.folder", str(tmp_path / "run")])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[run]\nsteps = 1" + "0" * 400, "run.steps is at most 9223372036854775807"),
        ("[run]\nseed = 18446744073709551616", "run.seed is at most 9223372036854775807"),
        ("[run]\nsteps = " + "1" * 5000, "a job file is TOML"),
        ("[model]\ndim = 1" + "0" * 300, "model.dim is from 1 to 1048576"),
        ("[model]\nblocks = 1000000000000", "model.blocks is from 1 to 4096"),
        ("[model]\nvocabulary = 1000000000000", "model.vocabulary is from 256 to 16777216"),
        ("[data]\nbatch = 40000000000", "data.batch is from 1 to 2147483647"),
        ("[pipeline]\nranks = 1" + "0" * 30, "10 layers were given for 1000000000000"),
        ("[pipeline]\nchunks = 1" + "0" * 30, "10 layers were given for 1000000000000"),
        ("[pipeline]\nmicrobatches = 1" + "0" * 30, "pipeline.microbatches is from 1 to 65536"),
        ("[pipeline]\ntimeout_s = 1e300", "pipeline.timeout_s is from 0.001 to 1000000.0"),
        ("[optimizer]\nweight_decay = 1" + "0" * 400, "optimizer.weight_decay is at least 0 and"),
        ("[optimizer]\nlearning_rate = nan", "optimizer.learning_rate is at least 0"),
        ('[data]\npath = "a\\u0000"', "data.path names a text file that can be read"),
        ("a = " + "[" * 5000, "a job file is TOML"),
    ],
)
def test_sizes_beyond_all_measure_are_refused_at_once(
    tmp_path: Path, text: str, words: str
) -> None:
    """They overflowed in the middle of something, or built a schedule for hours."""
    with pytest.raises(UsageError) as caught:
        check_job(read_toml(Job, written(tmp_path, text)))
    assert words in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_pipe_is_refused_because_every_rank_would_read_it(tmp_path: Path) -> None:
    """Ranks have no stdin: `npu-pipe train /dev/stdin` trained the default job."""
    os.mkfifo(tmp_path / "job.toml")
    with pytest.raises(ConfigError, match="save it as a file"):
        read_toml(Job, tmp_path / "job.toml")
