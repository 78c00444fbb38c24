"""Records that are written to a file can be read back, whatever they hold and however the run ended."""

import gzip
import math
from pathlib import Path

import msgspec
import pytest

from flashproof.reports.record import Judgement, Manifest, Record, append, figure, read
from flashproof.tests.suite.reports import building


def test_every_type_comes_back_equal(tmp_path: Path) -> None:
    records = building.cpu_run() + building.gpu_run()
    records.append(Manifest(run=building.CPU, case_set=1, effort="default", dtypes=["float32"], lines=1, marks="0123"))
    types = {type(record) for record in records}
    assert types == set(Record.__args__), "the builder leaves a type out"
    assert list(read(building.write(tmp_path / "run.jsonl", records))) == records


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -1.5e-300, 1.0])
def test_figures_that_are_not_finite_come_back(tmp_path: Path, value: float) -> None:
    path = building.write(
        tmp_path / "run.jsonl", [building.judgement(rho=figure(value), worst=building.worst(1.0, got=figure(value)))]
    )
    (record,) = read(path)
    assert isinstance(record, Judgement)
    assert record.rho is not None
    assert record.worst is not None
    for back in (float(record.rho), float(record.worst.got)):
        assert back == value or (math.isnan(back) and math.isnan(value))


def test_a_torn_last_line_loses_nothing_before_it(tmp_path: Path) -> None:
    records: list[Record] = [building.environment(), building.judgement(), building.judgement(case="é ü 日本")]
    whole = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
    path = tmp_path / "run.jsonl"
    last = len(whole) - len(msgspec.json.encode(records[2])) - 1
    for torn in range(last + 1, len(whole) - 1):  # every byte of the last line, also inside a character
        path.write_bytes(whole[:torn])
        assert list(read(path)) == records[:2]


def test_a_packed_file_reads_as_the_file(tmp_path: Path) -> None:
    path = building.write(tmp_path / "run.jsonl", [building.environment(), building.judgement()])
    packed = tmp_path / "run.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert list(read(packed)) == list(read(path))


def test_a_broken_line_before_the_last_is_named(tmp_path: Path) -> None:
    path = building.write(tmp_path / "run.jsonl", [building.environment()])
    with path.open("a") as file:
        file.write('{"type": "judgement", "run"\n')
    append(path, building.judgement())
    with pytest.raises(ValueError, match=r"run\.jsonl, line 2: not a record"):
        list(read(path))


def test_records_of_before_the_later_fields_are_read(tmp_path: Path) -> None:
    fields = msgspec.json.decode(msgspec.json.encode(building.judgement()))
    del fields["link"], fields["axes"], fields["message"]
    path = tmp_path / "run.jsonl"
    path.write_bytes(msgspec.json.encode(fields) + b"\n")
    assert list(read(path)) == [building.judgement()]
