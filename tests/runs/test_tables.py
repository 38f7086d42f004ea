import pyarrow.parquet as pq

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
