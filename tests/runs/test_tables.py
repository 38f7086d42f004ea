import math
import subprocess
import sys

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from fedlens.core.errors import BadInput
from fedlens.runs import tables


def rows(*rounds):
    return [(round, client, "upload", 10 * round, 5) for round in rounds for client in (0, 1)]


def numbers(folder):
    return tables.read(folder, tables.BYTES)["round"].to_pylist()


def test_parts_read_as_one_table(tmp_path):
    table = tables.GrowingTable(tmp_path, tables.BYTES)
    for round in range(1, 200):
        table.add(rows(round))
        table.flush()
    assert numbers(tmp_path) == [r for r in range(1, 200) for _ in (0, 1)]
    assert len(list(tmp_path.iterdir())) <= 66
    assert pq.read_table(tmp_path).num_rows == 398  # as any other reader sees it
    table.merge()
    assert len(list(tmp_path.iterdir())) == 1 and len(numbers(tmp_path)) == 398


def test_cut_forgets_what_came_later(tmp_path):
    table = tables.GrowingTable(tmp_path, tables.BYTES)
    for span in ((1, 2), (3,), (4, 5, 6)):
        table.add(rows(*span))
        table.flush()
    table.cut(4)
    assert numbers(tmp_path) == [1, 1, 2, 2, 3, 3, 4, 4]
    table.cut(0)
    assert numbers(tmp_path) == []


def test_a_crash_between_merging_and_deleting_counts_nothing_twice(tmp_path):
    table = tables.GrowingTable(tmp_path, tables.BYTES)
    for round in (1, 2, 3):
        table.add(rows(round))
        table.flush()
    left = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    table.merge()
    for name, data in left.items():
        (tmp_path / name).write_bytes(data)
    assert numbers(tmp_path) == [1, 1, 2, 2, 3, 3]
    table.cut(3)
    assert len(list(tmp_path.iterdir())) == 1


def test_nothing_waiting_writes_nothing(tmp_path):
    table = tables.GrowingTable(tmp_path / "empty", tables.METRICS)
    table.flush()
    assert list((tmp_path / "empty").iterdir()) == [] and numbers(tmp_path / "empty") == []


def test_the_seal_is_of_rows_however_they_are_stored(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "_PARTS", 3)
    table, seals = tables.GrowingTable(tmp_path, tables.BYTES), {}
    for round in range(1, 9):
        table.add(rows(round))
        table.flush()
        seals[round] = table.seal()
    assert len(set(seals.values())) == 8 and [seals[round][0] for round in seals] == [*range(2, 17, 2)]
    for round, seal in seals.items():  # parts of earlier rounds have been merged since
        assert tables.Digest(tables.until(tmp_path, tables.BYTES, round)).seal() == seal
    table.cut(5)
    assert table.seal() == seals[5] == tables.GrowingTable(tmp_path, tables.BYTES).seal()


def grown(tmp_path, rounds=6):
    table = tables.GrowingTable(tmp_path / "t", tables.BYTES, copy=tmp_path / "t.copy")
    for round in range(1, rounds + 1):
        table.add(rows(round))
        table.flush()
    return table


def recovered(table, round=6):
    found, lost = tables.recovered(table.folder, table.copy, tables.BYTES, round, table.seal())
    return sorted(set(found["round"].to_pylist())), lost


def test_rows_are_recovered_from_parts_and_copy_together(tmp_path):
    table = grown(tmp_path)
    assert recovered(table) == ([1, 2, 3, 4, 5, 6], [])
    (tmp_path / "t/000002-000002.parquet").unlink()
    data = bytearray((tmp_path / "t.copy").read_bytes())
    data[-9] ^= 1  # of the last record
    data[9] ^= 1  # of the first
    (tmp_path / "t.copy").write_bytes(data)
    assert recovered(table) == ([1, 2, 3, 4, 5, 6], [])
    (tmp_path / "t/000001-000001.parquet").write_bytes(b"PAR1")
    (tmp_path / "t/000006-000006.parquet").unlink()
    assert recovered(table) == ([2, 3, 4, 5], [1, 6])
    assert tables.spans([1, 6]) == "rounds 1 and 6" and tables.spans([2, 3, 9]) == "rounds 2 to 3 and 9"
    (tmp_path / "t.copy").unlink()
    assert recovered(table) == ([3, 4, 5], [1, 2, 6])


def test_rows_that_are_all_there_but_others_are_all_lost(tmp_path):
    """Of a version whose parts had no checksums: which row is wrong, nobody knows."""
    table = grown(tmp_path)
    (tmp_path / "t.copy").unlink()
    other = tables.GrowingTable(tmp_path / "t", tables.BYTES)
    other.add([(3, client, "upload", 31, 5) for client in (0, 1)])
    other.flush()
    assert recovered(table) == ([], [1, 2, 3, 4, 5, 6])


def test_a_merge_of_damaged_parts_waits_for_the_copy(tmp_path):
    table = grown(tmp_path, 3)
    (tmp_path / "t/000002-000002.parquet").write_bytes(b"PAR1")
    table.merge()
    assert len([*(tmp_path / "t").iterdir()]) == 3 and recovered(table, 3) == ([1, 2, 3], [])
    table.replace(tables.recovered(table.folder, table.copy, tables.BYTES, 3, table.seal())[0])
    assert numbers(tmp_path / "t") == [1, 1, 2, 2, 3, 3]
    assert sorted(path.name for path in (tmp_path / "t").iterdir()) == [
        "000001-000003.parquet",
        "000002-000002.parquet.damaged",
    ]


def test_a_flipped_bit_of_a_part_changes_no_row(tmp_path):
    part = next(iter(grown(tmp_path, 1).folder.iterdir()))
    whole, rows, noticed = part.read_bytes(), tables.read_part(part, tables.BYTES), 0
    pages = range(4, len(whole) - 8 - int.from_bytes(whole[-8:-4], "little"))
    for at in pages:
        part.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        try:
            assert tables.read_part(part, tables.BYTES).equals(rows)
        except BadInput:
            noticed += 1
    assert noticed > len(pages) // 2


MEASURED = [
    (1, None, "pooled test", "global", "examples", "accuracy", 0.5),
    (1, 3, "client test", "personal after", "examples", "accuracy", -0.0),
    (2, None, "pooled test", "global", "examples", "loss", math.nan),
    (2, 0, "Prüfung", "", "clients", "accuracy", math.inf),
    (3, None, "validation", "global", "examples", "loss", None),
]


def measured() -> pa.Table:
    """As pyarrow makes it."""
    kinds = zip(zip(*MEASURED, strict=True), tables.METRICS, strict=True)
    return pa.table([pa.array(values, each.type) for values, each in kinds], tables.METRICS)


def test_columns_are_those_of_pyarrow():
    for values, expected in zip(zip(*MEASURED, strict=True), measured().columns, strict=True):
        found = tables._column(values, expected.type)
        found.validate(full=True)
        assert found.type == expected.type and str(found.to_pylist()) == str(expected.to_pylist())
        assert found.null_count == expected.null_count
    assert tables.empty(tables.METRICS).equals(tables.METRICS.empty_table())


def test_the_seal_is_what_it_was_with_numpy_of_pyarrow():
    """A run from before goes on: the checksums in its checkpoints hold."""
    rows, digest = tables.Digest(measured()).seal()
    assert (rows, digest[:16]) == (5, "f870af8d801da2e8")


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"metric": "loss"}, pc.field("metric") == "loss"),
        ({"of_clients": False}, pc.field("client").is_null()),
        (
            {"of_clients": True, "metric": "accuracy"},
            pc.field("client").is_valid() & (pc.field("metric") == "accuracy"),
        ),
        ({"client": 3}, pc.field("client") == 3),
        ({"round": 2, "model": "global"}, (pc.field("round") == 2) & (pc.field("model") == "global")),
        ({"model": "nobody's"}, pc.field("model") == "nobody's"),
    ],
)
def test_rows_that_are_wanted(wanted, expected):
    found = tables.where(measured(), **wanted).to_pylist()
    assert str(found) == str(measured().filter(expected).to_pylist())


def test_nobody_waits_for_pandas(tmp_path):
    """pyarrow imports it to look at values; a run need not."""
    code = f"""
import sys, pathlib
from fedlens.runs import tables
table = tables.GrowingTable(pathlib.Path({str(tmp_path)!r}), tables.METRICS)
table.cut(0)
table.add([(1, None, "pooled test", "global", "examples", "accuracy", 0.5)])
table.flush(), table.seal(), table.merge()
print(tables.where(tables.read(table.folder, tables.METRICS), metric="accuracy")["value"].to_pylist())
print("pandas" in sys.modules)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout == "[0.5]\nFalse\n", found.stderr
