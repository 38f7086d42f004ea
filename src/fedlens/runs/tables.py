"""Tidy tables that grow with a run: a folder of Parquet parts, readable as one table at any moment."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..core.errors import BadInput
from ..core.files import write_atomic

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

    def __init__(self, folder: Path, schema: pa.Schema):
        self.folder, self.schema = folder, schema
        self._waiting: list[tuple[Any, ...]] = []
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, rows: Iterable[Sequence[Any]]) -> None:
        self._waiting += [tuple(row) for row in rows]

    def flush(self) -> None:
        if not self._waiting:
            return
        columns = zip(*self._waiting, strict=True)
        self._write(pa.table([pa.array(c, f.type) for c, f in zip(columns, self.schema, strict=True)], self.schema))
        self._waiting = []
        if len(_parts(self.folder)) > _PARTS:
            self.merge()

    def take(self, table: pa.Table, round: int) -> None:
        """Another run's rows up to this round, as a part of this one."""
        if (rows := _until(table, round)).num_rows:
            self._write(rows)

    def merge(self) -> None:
        """All parts into one."""
        parts = _drop_covered(_parts(self.folder))
        if len(parts) > 1:
            self._write(_read(parts, self.schema))
            for part in parts:
                part.unlink()

    def cut(self, round: int) -> None:
        """Forget what was written after this many rounds."""
        _drop_merged(self.folder)
        for part in _parts(self.folder):
            first, last = span(part)
            if last <= round:
                continue
            if first <= round:
                self._write(_until(read_part(part, self.schema), round))
            part.unlink()

    def _write(self, table: pa.Table) -> None:
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        rounds = table["round"].to_pylist()
        write_atomic(self.folder / f"{min(rounds):06d}-{max(rounds):06d}.parquet", sink.getvalue().to_pybytes())


def _until(table: pa.Table, round: int) -> pa.Table:
    return table.filter(pa.array([r <= round for r in table["round"].to_pylist()], pa.bool_()))


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
        with pq.ParquetFile(part, pre_buffer=False) as file:
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


def _drop_merged(folder: Path) -> None:
    parts = _parts(folder)
    for part in set(parts) - set(_drop_covered(parts)):
        part.unlink()
