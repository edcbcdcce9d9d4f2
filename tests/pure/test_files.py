"""Schedule files: what is saved comes back, and what is wrong is refused and never lost."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from core_helpers.random_cases import random_schedule
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_pipe import (
    build_schedule,
    load_program,
    load_schedule,
    lower,
    save_program,
    save_schedule,
)
from npu_pipe.errors import ConfigError, DeadlockError, ScheduleError
from npu_pipe.ir import files
from npu_pipe.ir.files import (
    program_from_json,
    program_to_json,
    schedule_from_json,
    schedule_hash,
    to_json,
)

SCHEDULE = build_schedule("1f1b", ranks=2, microbatches=2)
PROGRAM = lower(SCHEDULE)


def edited(**fields: object) -> str:
    """The file with some fields changed, None for taken out, and its hash left as it was."""
    data = json.loads(to_json(SCHEDULE)) | fields
    return json.dumps({field: value for field, value in data.items() if value is not None})


def resealed(**fields: object) -> str:
    """The file with some fields changed and the hash made to fit."""
    data = json.loads(to_json(SCHEDULE)) | fields
    content = {
        key: data[key] for key in ("microbatches", "placement", "mirrored", "training", "orders")
    }
    data["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps(data)


@given(st.integers(0, 2**32))
@settings(derandomize=True, deadline=None, max_examples=100)
def test_every_schedule_survives_its_file(seed):
    schedule = random_schedule(Random(seed))
    assert schedule_from_json(to_json(schedule)) == schedule


@given(st.integers(0, 2**32))
@settings(derandomize=True, deadline=None, max_examples=50)
def test_every_program_survives_its_file(seed):
    rng = Random(seed)
    program = lower(random_schedule(rng), prefetch=rng.randint(2, 4))
    assert program_from_json(program_to_json(program)) == program


def test_a_program_file_is_read_with_the_same_care(tmp_path):
    text = program_to_json(PROGRAM)
    with pytest.raises(ScheduleError, match=r"it has no .*npu_pipe\.schedule"):
        schedule_from_json(text)
    with pytest.raises(ScheduleError, match=r"it has no .*npu_pipe\.program"):
        program_from_json(to_json(SCHEDULE))
    with pytest.raises(ScheduleError, match="carries the hash of its content"):
        program_from_json(text.replace('"prefetch": 2', '"prefetch": 3'))
    with pytest.raises(ScheduleError, match="the field 'prefetch' is missing"):
        program_from_json(text.replace(',\n "prefetch": 2', ""))
    with pytest.raises(ScheduleError, match="'prefetch' is True"):
        program_from_json(text.replace('"prefetch": 2', '"prefetch": true'))
    save_program(PROGRAM, tmp_path / "one.json")
    assert load_program(tmp_path / "one.json") == PROGRAM


def test_the_docstring_shows_a_file_as_it_is():
    example = files.__doc__[files.__doc__.index("{") : files.__doc__.rindex("}") + 1]
    shown, real = json.loads(example), json.loads(to_json(SCHEDULE))
    assert shown | {"sha256": real["sha256"]} == real


def test_saved_files_come_back(tmp_path):
    path = tmp_path / "one.json"
    save_schedule(SCHEDULE, path)
    assert load_schedule(str(path)) == SCHEDULE
    other = build_schedule("gpipe", ranks=3, microbatches=4)
    save_schedule(other, path)
    assert load_schedule(path) == other
    assert [file.name for file in tmp_path.iterdir()] == ["one.json"]


def test_the_name_is_for_people_and_does_not_count_in_the_hash():
    assert schedule_hash(replace(SCHEDULE, name="mine")) == schedule_hash(SCHEDULE)
    assert schedule_from_json(edited(name="mine")).name == "mine"
    assert schedule_from_json(edited(name="")).name == ""
    assert schedule_from_json(edited(name="\u6d41\u6c34")).name == "\u6d41\u6c34"


def test_whatever_else_differs_has_another_hash():
    others = [
        SCHEDULE,
        build_schedule("1f1b", ranks=2, microbatches=3),
        build_schedule("gpipe", ranks=2, microbatches=2),
        replace(SCHEDULE, placement=(1, 0)),
        replace(SCHEDULE, mirrored=(0,)),
        replace(SCHEDULE, training=False),
        replace(SCHEDULE, orders=SCHEDULE.orders[::-1]),
    ]
    assert len(set(map(schedule_hash, others))) == len(others)


@pytest.mark.parametrize(
    "fields",
    [
        {"microbatches": 3},
        {"placement": [1, 0]},
        {"mirrored": [0]},
        {"training": False},
        {"orders": [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]},
        {"sha256": "0" * 64},
        {"sha256": ""},
    ],
)
def test_an_edited_file_is_refused_by_its_hash(fields):
    with pytest.raises(ScheduleError, match="carries the hash of its content") as error:
        schedule_from_json(edited(**fields))
    assert "save it again" in error.value.cure


def test_a_file_with_a_fitting_hash_is_proved_all_the_same():
    swapped = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    with pytest.raises(DeadlockError):
        schedule_from_json(resealed(orders=swapped))
    with pytest.raises(ScheduleError, match="rank 1 holds none"):
        schedule_from_json(resealed(placement=[0, 0]))
    with pytest.raises(ScheduleError, match="0F2 is missing"):
        schedule_from_json(resealed(microbatches=10**18))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"format": None}, "it has no"),
        ({"format": "other"}, "it has no"),
        ({"format": 1}, "it has no"),
        ({"version": None}, "version None"),
        ({"version": 2}, "version 2"),
        ({"version": "1"}, "version '1'"),
        ({"version": True}, "'version' is True"),
        ({"version": 1.0}, "'version' is 1.0"),
        ({"name": None}, "the field 'name' is missing"),
        ({"orders": None}, "the field 'orders' is missing"),
        ({"sha256": None}, "the field 'sha256' is missing"),
        ({"author": "me"}, "the field 'author' is unknown"),
        ({"name": 1}, "'name' is 1"),
        ({"microbatches": True}, "'microbatches' is True"),
        ({"microbatches": 2.0}, "'microbatches' is 2.0"),
        ({"microbatches": "2"}, "'microbatches' is '2'"),
        ({"placement": {"0": 0}}, "'placement' is {'0': 0}"),
        ({"placement": [0, True]}, "'placement' holds True"),
        ({"placement": [0, 1.0]}, "'placement' holds 1.0"),
        ({"placement": [0, [1]]}, r"'placement' holds \[1\]"),
        ({"mirrored": [False]}, "'mirrored' holds False"),
        ({"training": 1}, "'training' is 1"),
        ({"training": "true"}, "'training' is 'true'"),
        ({"orders": "0F0"}, "'orders' is '0F0'"),
        ({"orders": ["0F0", "1F0"]}, "the order of rank 0 is '0F0'"),
        ({"orders": [[], [1]]}, r"the order of rank 1 is \[1\]"),
        ({"orders": [["0F0", "0F0junk"], []]}, "'0F0junk' is not: rank 0 has it at position 1"),
    ],
)
def test_wrong_fields_are_refused_by_name(fields, match):
    with pytest.raises(ScheduleError, match=match):
        schedule_from_json(edited(**fields))


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "null",
        "[]",
        "1",
        '"npu_pipe.schedule"',
        "{}",
        "{'format': 1}",
        "not json",
        "NaN",
        "\ufeff" + to_json(SCHEDULE),
        to_json(SCHEDULE) * 2,
        "[" * 100_000,
        '{"a":' * 100_000,
        edited(microbatches=2).replace('"microbatches": 2', '"microbatches": NaN'),
        edited(microbatches=2).replace('"microbatches": 2', '"microbatches": Infinity'),
        edited(microbatches=2).replace('"microbatches": 2', '"microbatches": 1e999'),
        edited(microbatches=2).replace('"microbatches": 2', '"microbatches": ' + "9" * 5000),
        edited().replace('"training": true', '"training": true, "training": true'),
        edited().replace('"orders": [[', '"orders": [{"a": 1, "a": 1}, ['),
    ],
    ids=range(20),
)
def test_what_is_no_such_file_is_refused(text):
    with pytest.raises(ScheduleError) as error:
        schedule_from_json(text)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("depth", [*range(5, 1000, 35)])
def test_deep_nesting_is_refused_at_any_depth(depth):
    nested = "[" * depth + "]" * depth
    for field in ("orders", "placement", "name", "version"):
        data = json.loads(edited())
        text = json.dumps(data | {field: "HERE"}).replace('"HERE"', nested)
        with pytest.raises(ScheduleError):
            schedule_from_json(text)


def test_a_file_cut_off_anywhere_is_refused():
    text = to_json(SCHEDULE).rstrip()
    for length in range(len(text)):
        with pytest.raises(ScheduleError):
            schedule_from_json(text[:length])


@given(st.integers(0, 2**32))
@settings(derandomize=True, deadline=None, max_examples=300)
def test_a_file_with_damaged_bytes_is_refused_or_the_same_schedule(seed):
    rng = Random(seed)
    data = bytearray(to_json(SCHEDULE).encode())
    for _ in range(rng.randint(1, 3)):
        data[rng.randrange(len(data))] = rng.choice(b'0123456789{}[]",:FBIW \n')
    try:
        schedule = schedule_from_json(data.decode())
    except ScheduleError:
        return
    assert replace(schedule, name=SCHEDULE.name) == SCHEDULE


def test_unreadable_paths_are_told(tmp_path):
    (tmp_path / "latin.json").write_bytes(b"\xff\xfe{}")
    (tmp_path / "folder.json").mkdir()
    for name in ("none.json", "latin.json", "folder.json", "no/such/folder.json", "a\0b.json"):
        with pytest.raises(ScheduleError, match="has to be read") as error:
            load_schedule(tmp_path / name)
        assert name in error.value.facts


@pytest.mark.parametrize("name", ["one", "one.txt", "one.JSON", "one.json.gz", ".csv", ""])
def test_another_ending_is_refused_before_anything_is_written(tmp_path, name):
    path = tmp_path / name if name else ""
    calls = (
        lambda: load_schedule(path),
        lambda: load_program(path),
        lambda: save_schedule(SCHEDULE, path),
        lambda: save_program(PROGRAM, path),
    )
    for call in calls:
        with pytest.raises(ScheduleError, match=r"end in \.json"):
            call()
    assert not list(tmp_path.iterdir())


def test_a_wrong_schedule_does_not_replace_a_good_file(tmp_path):
    for ending in ("json", "csv"):
        path = tmp_path / f"1f1b.{ending}"
        save_schedule(SCHEDULE, path)
        with pytest.raises(ScheduleError, match="is missing"):
            save_schedule(replace(SCHEDULE, microbatches=3), path)
        assert load_schedule(path) == SCHEDULE
        save_program(PROGRAM, path)
        with pytest.raises(ScheduleError, match="0SEND_F0 is missing"):
            save_program(replace(PROGRAM, orders=SCHEDULE.orders), path)
        assert load_program(path).orders == PROGRAM.orders


def test_a_write_that_fails_leaves_the_old_file_and_no_rest(tmp_path, monkeypatch):
    path = tmp_path / "one.json"
    save_schedule(SCHEDULE, path)
    old = path.read_bytes()

    def full(self, data):
        self.write_text(data.decode()[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ConfigError, match=r"is written into.*No space left"):
        save_schedule(build_schedule("gpipe", ranks=2, microbatches=9), path)
    assert path.read_bytes() == old
    assert [file.name for file in tmp_path.iterdir()] == ["one.json"]


def test_places_that_cannot_be_written_are_told(tmp_path):
    (tmp_path / "folder.json").mkdir()
    for name in ("folder.json", "no/such/folder.json", "a\0b.json"):
        with pytest.raises(ConfigError, match="is written into a folder that exists"):
            save_schedule(SCHEDULE, tmp_path / name)
    assert [file.name for file in tmp_path.iterdir()] == ["folder.json"]


def test_two_writers_of_one_file_do_not_share_their_unfinished_one(tmp_path):
    """Each names it by its process; what another one left behind is not touched."""
    (tmp_path / "one.json.1.partial").write_text("of another process")
    save_schedule(SCHEDULE, tmp_path / "one.json")
    assert (tmp_path / "one.json.1.partial").read_text() == "of another process"
    assert load_schedule(tmp_path / "one.json") == SCHEDULE
