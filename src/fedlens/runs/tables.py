"""Tidy tables that grow with a run: a folder of Parquet parts, readable as one table at any moment."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..core.errors import BadInput
from ..core.files import Seal, Unsynced, open_regular, write_atomic

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


class GrowingTable:
    """Rows wait in memory until `flush`; each flush is one part, named by its first and last round."""

    def __init__(self, folder: Path, schema: pa.Schema, unsynced: Unsynced | None = None):
        """`unsynced` makes its parts durable, together with what else a run has written."""
        self.folder, self.schema, self.unsynced = folder, schema, unsynced or Unsynced()
        self._waiting: list[tuple[Any, ...]] = []
        self._digest: Digest | None = None
        self.unsynced.mkdir(folder)

    def add(self, rows: Iterable[Sequence[Any]]) -> None:
        self._waiting += [tuple(row) for row in rows]

    def flush(self) -> None:
        if not self._waiting:
            return
        columns = zip(*self._waiting, strict=True)
        table = pa.table([pa.array(c, f.type) for c, f in zip(columns, self.schema, strict=True)], self.schema)
        self._so_far().add(table)
        self._write(table)
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
            self._write(rows)

    def merge(self) -> None:
        """All parts into one."""
        if len(parts := _parts(self.folder)) > 1:
            whole = self._write(_read(_drop_covered(parts), self.schema), first=True)
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
        self.unsynced.sync()  # a part that came back after a power cut would cover new ones

    def _write(self, table: pa.Table, first: bool = False) -> Path:
        """`first`: at once, because parts are removed whose rows are in this one."""
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        rounds = table["round"].to_pylist()
        path, data = self.folder / f"{min(rounds):06d}-{max(rounds):06d}.parquet", sink.getvalue().to_pybytes()
        if first:
            write_atomic(path, data, durable=self.unsynced.durable)
        else:
            self.unsynced.write(path, data)
        return path


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
                digest.update(column.fill_null(nothing).to_numpy().tobytes())

    def seal(self) -> Seal:
        return self.rows, hashlib.sha256(b"".join(each.digest() for each in self._columns)).hexdigest()


def _until(table: pa.Table, round: int) -> pa.Table:
    return table.filter(pa.array([r <= round for r in table["round"].to_pylist()], pa.bool_()))


def until(folder: Path, schema: pa.Schema, round: int) -> pa.Table:
    """The rows up to this round, in the order they were written; parts of later rounds alone are not looked at."""
    earlier = [part for part in _parts(folder) if span(part)[0] <= round]
    return _until(_read(_drop_covered(earlier), schema), round)


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
    return pa.concat_tables([read_part(part, schema) for part in parts]) if parts else schema.empty_table()


def read_part(part: Path, schema: pa.Schema) -> pa.Table:
    """Refuses a damaged one; one that is gone was merged into another."""
    try:
        # by this thread alone: a part is small, and pyarrow waits for ever for a thread that found no memory
        with open_regular(part) as opened, pq.ParquetFile(opened, pre_buffer=False) as file:
            return file.read(use_threads=False).cast(schema)
    except FileNotFoundError:
        raise
    except (ValueError, OSError):
        raise BadInput(f"{part} is damaged: it is not a whole Parquet file") from None


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
