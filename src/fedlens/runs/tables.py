"""Tidy tables that grow with a run: a folder of Parquet parts, readable as one table at any moment."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..core.errors import BadInput
from ..core.files import Seal, Unsynced, append, open_regular, read_bytes, sealed, unsealed, write_atomic

METRICS = pa.schema(
    [
        ("round", pa.int32()),  # rounds done
        ("client", pa.int32()),  # none: all of them
        ("split", pa.string()),  # pooled test, client test
        ("model", pa.string()),  # global, personal before, personal after, fine-tuned
        ("weighting", pa.string()),  # examples or clients count alike
        ("metric", pa.string()),
        ("value", pa.float64()),
    ]
)
BYTES = pa.schema(
    [
        ("round", pa.int32()),
        ("client", pa.int32()),
        ("kind", pa.string()),
        ("payload", pa.int64()),
        ("header", pa.int64()),
    ]
)
_NAME = re.compile(r"[0-9]{6,}-[0-9]{6,}\.parquet", re.ASCII)
_PARTS = 64  # merged into one when there are more: a long run must not leave thousands of files
_RECORD = b"\x89FLrows\n"  # begins each record of a copy, so that a damaged one costs no other


class GrowingTable:
    """Rows wait in memory until `flush`; each flush is one part, named by its first and last round."""

    def __init__(self, folder: Path, schema: pa.Schema, unsynced: Unsynced | None = None, copy: Path | None = None):
        """`unsynced` makes its parts durable, together with what else a run has written.

        `copy`: a file with the same rows, for `recovered`. It is not synced: parts are, and damage hits either.
        """
        self.folder, self.schema, self.unsynced, self.copy = folder, schema, unsynced or Unsynced(), copy
        self._waiting: list[tuple[Any, ...]] = []
        self._digest: Digest | None = None
        self.unsynced.mkdir(folder)

    def add(self, rows: Iterable[Sequence[Any]]) -> None:
        self._waiting += [tuple(row) for row in rows]

    def flush(self) -> None:
        if not self._waiting:
            return
        columns = zip(*self._waiting, strict=True)
        table = pa.table([_column(c, f.type) for c, f in zip(columns, self.schema, strict=True)], self.schema)
        self._so_far().add(table)
        self._copy_more(self._write(table)[1])
        self._waiting = []
        if len(_parts(self.folder)) > _PARTS:
            self.merge()

    def seal(self) -> Seal:
        """Number and checksum of all rows that were flushed."""
        return self._so_far().seal()

    def _so_far(self) -> Digest:
        if self._digest is None:
            self._digest = Digest(read(self.folder, self.schema))
        return self._digest

    def take(self, table: pa.Table, round: int) -> None:
        """Another run's rows up to this round, as a part of this one."""
        if (rows := _until(table, round)).num_rows:
            self._so_far().add(rows)
            self._copy_more(self._write(rows)[1])

    def merge(self) -> None:
        """All parts into one; parts that were damaged meanwhile stay for the next start, which has the copy."""
        if len(parts := _parts(self.folder)) > 1:
            try:
                rows = _read(_drop_covered(parts), self.schema)
            except BadInput:
                return
            if self._digest and self._digest.seal() != Digest(rows).seal():
                return
            whole, data = self._write(rows, first=True)
            self._copy_all(data)
            for part in parts:
                if part != whole:
                    self.unsynced.remove(part)

    def cut(self, round: int) -> None:
        """Forget what was written after this many rounds."""
        self._digest = None
        parts = _parts(self.folder)
        for part in {*parts} - {*_drop_covered(parts)}:
            self.unsynced.remove(part)
        for part in _parts(self.folder):
            first, last = span(part)
            if last <= round:
                continue
            if first <= round:
                self._write(_until(read_part(part, self.schema), round), first=True)
            self.unsynced.remove(part)
        self._copy_all(_encoded(read(self.folder, self.schema)))
        self.unsynced.sync()  # a part that came back after a power cut would cover new ones

    def replace(self, table: pa.Table) -> None:
        """These rows in place of all others; what cannot be read stays beside them under another name."""
        new = self._write(table, first=True)[0] if table.num_rows else None
        for part in _parts(self.folder):
            if part == new:
                continue
            try:
                read_part(part, self.schema)
                self.unsynced.remove(part)
            except BadInput:
                self.unsynced.rename(part, part.with_name(f"{part.name}.damaged"))
        self._digest = None
        self.unsynced.sync()

    def _write(self, table: pa.Table, first: bool = False) -> tuple[Path, bytes]:
        """`first`: at once, because parts are removed whose rows are in this one."""
        rounds, data = table["round"].to_pylist(), _encoded(table)
        path = self.folder / f"{min(rounds):06d}-{max(rounds):06d}.parquet"
        if first:
            write_atomic(path, data, durable=self.unsynced.durable)
        else:
            self.unsynced.write(path, data)
        return path, data

    def _copy_more(self, data: bytes) -> None:
        if self.copy is not None:
            append(self.copy, _RECORD + sealed(data))

    def _copy_all(self, data: bytes) -> None:
        if self.copy is not None:
            write_atomic(self.copy, _RECORD + sealed(data))


# ---- without pandas, which pyarrow imports to look at the first value that it is given: a third of a second ----
_NUMPY = {pa.int32(): np.int32, pa.int64(): np.int64, pa.float64(): np.float64}


def _column(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """As pa.array makes it, of numbers or texts or None."""
    known = np.array([value is not None for value in values], bool)
    valid = None if known.all() else pa.py_buffer(np.packbits(known, bitorder="little").tobytes())
    if pa.types.is_string(kind):
        texts = [(value or "").encode() for value in values]
        ends = np.cumsum([0, *map(len, texts)], dtype=np.int32)
        buffers = [pa.py_buffer(ends.tobytes()), pa.py_buffer(b"".join(texts))]
    else:
        numbers = np.array([0 if value is None else value for value in values], _NUMPY[kind])
        buffers = [pa.py_buffer(numbers.tobytes())]
    return pa.Array.from_buffers(kind, len(values), [valid, *buffers])


def empty(schema: pa.Schema) -> pa.Table:
    return pa.table([_column((), each.type) for each in schema], schema)


def where(table: pa.Table, *, of_clients: bool | None = None, **wanted: Any) -> pa.Table:
    """The rows with these values; those of single clients alone, or all but those."""
    import pyarrow.compute as pc  # only whoever reads needs it

    if of_clients is not None:
        client = table["client"]
        table = table.filter(client.is_valid() if of_clients else client.is_null())
    for name, value in wanted.items():
        kind = table.schema.field(name).type
        same = pc.is_in(table[name], value_set=_column([value], kind))  # pyright: ignore[reportAttributeAccessIssue]
        table = table.filter(same)
    return table


def _encoded(table: pa.Table) -> bytes:
    """As a Parquet file, whose pages have checksums."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return sink.getvalue().to_pybytes()


class Digest:
    """Number and checksum of rows, the same however they are divided into parts."""

    def __init__(self, table: pa.Table):
        self.rows = 0
        self._columns = [hashlib.sha256() for _ in table.column_names]
        self.add(table)

    def add(self, table: pa.Table) -> None:
        self.rows += table.num_rows
        for digest, column in zip(self._columns, table.columns, strict=True):
            if pa.types.is_string(column.type):
                digest.update("".join(f"{text}\0" for text in column.to_pylist()).encode())
            else:
                nothing = float("nan") if pa.types.is_floating(column.type) else -1
                values = [nothing if value is None else value for value in column.to_pylist()]
                digest.update(np.array(values, _NUMPY[column.type]).tobytes())

    def seal(self) -> Seal:
        return self.rows, hashlib.sha256(b"".join(each.digest() for each in self._columns)).hexdigest()


def spans(rounds: Sequence[int]) -> str:
    """Rising numbers in words: rounds 1 to 4 and 9."""
    starts = [n for n in rounds if n - 1 not in {*rounds}]
    ends = [n for n in rounds if n + 1 not in {*rounds}]
    return "rounds " + " and ".join(f"{a} to {b}" if b > a else f"{a}" for a, b in zip(starts, ends, strict=True))


def _until(table: pa.Table, round: int) -> pa.Table:
    return table.filter(pa.array([r <= round for r in table["round"].to_pylist()], pa.bool_()))


def until(folder: Path, schema: pa.Schema, round: int) -> pa.Table:
    """The rows up to this round, in the order they were written; parts of later rounds alone are not looked at."""
    earlier = [part for part in _parts(folder) if span(part)[0] <= round]
    return _until(_read(_drop_covered(earlier), schema), round)


def recovered(folder: Path, copy: Path, schema: pa.Schema, round: int, expected: Seal) -> tuple[pa.Table, list[int]]:
    """(the rows up to this round from whole parts and the copy, rounds of which rows are lost)."""
    parts, copied = dict(_readable_parts(folder, schema, round)), dict(_records(copy, schema))
    best = empty(schema)
    for known in (copied, parts | copied, copied | parts):
        table = _until(_joined(known, schema), round)
        if Digest(table).seal() == expected:
            return table, []
        best = table if best.num_rows < table.num_rows < expected[0] else best
    there = {*best["round"].to_pylist()}
    return best, [each for each in range(1, round + 1) if each not in there] or [*range(1, round + 1)]


def _readable_parts(folder: Path, schema: pa.Schema, round: int) -> Iterator[tuple[tuple[int, int], pa.Table]]:
    for part in _parts(folder):
        if span(part)[0] <= round:
            with contextlib.suppress(BadInput, FileNotFoundError):
                yield span(part), read_part(part, schema)


def _records(copy: Path, schema: pa.Schema) -> Iterator[tuple[tuple[int, int], pa.Table]]:
    """The rows of a copy that are as they were written, by their first and last round."""
    data = b""
    with contextlib.suppress(OSError, ValueError):
        data = read_bytes(copy)
    for record in data.split(_RECORD)[1:]:
        with contextlib.suppress(ValueError, OSError):
            table = _decoded(pa.BufferReader(unsealed(record)), schema)
            if rounds := table["round"].to_pylist():
                yield (min(rounds), max(rounds)), table


def _joined(known: dict[tuple[int, int], pa.Table], schema: pa.Schema) -> pa.Table:
    """Rows by their rounds, those of spans that lie within another left out."""
    inner = {a for a in known for b in known if a != b and b[0] <= a[0] and a[1] <= b[1]}
    chosen = [known[each] for each in sorted(known) if each not in inner]
    return pa.concat_tables(chosen) if chosen else empty(schema)


def read(folder: Path, schema: pa.Schema) -> pa.Table:
    """The whole table, in the order it was written."""
    for _ in range(3):
        with contextlib.suppress(FileNotFoundError):  # merged since it was listed
            return _read(parts(folder), schema)
    raise BadInput(f"{folder} has changed while it was read; try again")


def parts(folder: Path, after: int = 0) -> list[Path]:
    """The files of a table with rows of later rounds, in order, without what was merged into another."""
    return _drop_covered([part for part in _parts(folder) if span(part)[1] > after])


def _read(parts: list[Path], schema: pa.Schema) -> pa.Table:
    return pa.concat_tables([read_part(part, schema) for part in parts]) if parts else empty(schema)


def read_part(part: Path, schema: pa.Schema) -> pa.Table:
    """Refuses a damaged one; one that is gone was merged into another."""
    try:
        with open_regular(part) as opened:
            return _decoded(opened, schema)
    except FileNotFoundError:
        raise
    except (ValueError, OSError):
        raise BadInput(f"{part} is damaged: it is not a whole Parquet file") from None


def _decoded(source: Any, schema: pa.Schema) -> pa.Table:
    """By this thread alone: a part is small, and pyarrow waits for ever for a thread that found no memory."""
    with pq.ParquetFile(source, pre_buffer=False, page_checksum_verification=True) as file:
        return file.read(use_threads=False).cast(schema)


def _parts(folder: Path) -> list[Path]:
    """Files of other names are none of ours."""
    return sorted(path for path in folder.glob("*.parquet") if _NAME.fullmatch(path.name))


def span(part: Path) -> tuple[int, int]:
    first, last = part.stem.split("-")
    return int(first), int(last)


def _drop_covered(parts: list[Path]) -> list[Path]:
    """Without the parts that a crash left beside the one they were merged into."""
    spans = {part: span(part) for part in parts}
    return [
        part
        for part, (first, last) in spans.items()
        if not any(other != part and a <= first and last <= b for other, (a, b) in spans.items())
    ]
