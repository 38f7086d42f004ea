"""Images that a table names: a CSV or Parquet file with a row for each."""

from __future__ import annotations

import csv
import io
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import BadInput, nearest
from ...core.files import read_bytes
from ..images import Decoded, Found
from ..paths import own_path
from ..source import LATER
from .listing import TEST_NAMES, Listed, OwnImages, notes_of
from .photos import parquet

_MOST = 1 << 30  # bytes of a table
_TRAIN, _TEST = ("train", "training"), ("test", "testing")
Row = tuple[int, dict[str, str]]  # its line, and what it says by column


@dataclass(frozen=True)
class Table(OwnImages):
    """A CSV or Parquet file with the columns path, label and, where they are known, client, group and split."""

    image: str = field(default="path", kw_only=True, metadata=LATER)  # columns; files are looked for beside the table
    label: str = field(default="label", kw_only=True, metadata=LATER)  # of classes
    client: str = field(default="client", kw_only=True, metadata=LATER)  # of owners; none: nobody knows
    group: str = field(
        default="group", kw_only=True, metadata=LATER
    )  # patients, whose images stay together; none: not even those that DICOM files name
    split: str = field(default="split", kw_only=True, metadata=LATER)  # train or test
    name = "table"

    def owners(self) -> int:
        rows, columns = self._rows()
        return len({row[self.client] for _, row in rows}) if self.client in columns else 0

    def find(self) -> Found:
        path = own_path(self.path, "data.path")
        rows, columns = self._rows()
        skipped: Counter[str] = Counter()
        parts = self._parts(path, rows, skipped) if self.split in columns else {}
        listed = [self._listed(path, line, row, parts.get(line, "")) for line, row in rows if parts.get(line) != "-"]
        _check_files(path, listed, [line for line, _ in rows if parts.get(line) != "-"])
        has_test = any(one.test for one in listed)

        def take(decoded: Decoded, owner: np.ndarray) -> Decoded:
            decoded = _by_number(decoded)
            return replace(decoded, users=owner) if decoded.owner_names else decoded

        group = "none" if self.group == "none" else "auto"
        return self.found((listed, has_test), f"table {path}", group, notes_of(skipped), take, path)

    def _rows(self) -> tuple[list[Row], Sequence[str]]:
        """(rows that have something in them, columns); refused where one of the needed two is lacking."""
        path = own_path(self.path, "data.path")
        if path.is_dir():
            raise BadInput(f"data.path is {self.path!r}, which is a folder; table needs a CSV or Parquet file")
        rows, columns = _parquet_rows(path) if path.suffix.lower() == ".parquet" else _csv_rows(path)
        for key, name in (("image", self.image), ("label", self.label)):
            if name not in columns:
                near = nearest(name, columns) if columns else "it is empty"
                raise BadInput(f"{path} has no column {name!r}; {near} (or name it by data.{key}=COLUMN)")
        for key, name in (("client", "client"), ("group", "group"), ("split", "split")):
            asked = getattr(self, key)
            if asked not in (name, "none") and asked not in columns:
                raise BadInput(f"data.{key} is {asked!r}, but {path} has no such column; {nearest(asked, columns)}")
        if not rows:
            raise BadInput(f"{path} has columns and no rows")
        return rows, columns

    def _listed(self, path: Path, line: int, row: Mapping[str, str], part: str) -> Listed:
        needed = [self.image, self.label, *([self.client] if self.client in row else [])]
        if lacking := next((name for name in needed if not row[name]), None):
            raise BadInput(f"{path}, line {line}: {lacking} is empty; fill it or remove the line")
        file = path.parent / Path(row[self.image]).expanduser()
        group = "" if self.group == "none" else row.get(self.group, "")
        return Listed(file, row[self.label], part == "test", row.get(self.client, ""), group)

    def _parts(self, path: Path, rows: list[Row], skipped: Counter[str]) -> dict[int, str]:
        """train, test, or - for a row that is left out, by its line."""
        said = {line: row[self.split].lower() for line, row in rows}
        tests = _TEST if set(_TEST) & set(said.values()) else TEST_NAMES
        parts = {}
        for line, word in said.items():
            if word not in (*_TRAIN, *_TEST, *TEST_NAMES):
                raise BadInput(f"{path}, line {line}: {self.split} is {word!r}, but it should be train or test")
            parts[line] = "train" if word in _TRAIN else "test" if word in tests else "-"
            if parts[line] == "-":
                skipped[f"images of the split {word}, as there is test"] += 1
        if "train" not in parts.values():
            raise BadInput(f"{path} has no row whose {self.split} is train")
        return parts


def _by_number(decoded: Decoded) -> Decoded:
    """Classes that are whole numbers in their order: 2 before 10."""
    if not all(name.isdecimal() for name in decoded.classes):
        return decoded
    order = sorted(range(len(decoded.classes)), key=lambda at: int(decoded.classes[at]))
    return replace(decoded, classes=tuple(decoded.classes[at] for at in order), y=np.argsort(order)[decoded.y])


def _check_files(path: Path, listed: list[Listed], lines: list[int]) -> None:
    """Every file is there, and named once."""
    gone = [place for place, one in enumerate(listed) if not os.path.isfile(one.file)]
    if gone:
        many = f"{len(gone)} files that are" if len(gone) > 1 else "a file that is"
        raise BadInput(
            f"{path} names {many} not there, the first in line {lines[gone[0]]}: {listed[gone[0]].file.name}; "
            f"paths are taken from {path.parent}"
        )
    first: dict[Path, int] = {}
    for line, one in zip(lines, listed, strict=True):
        if (before := first.setdefault(one.file, line)) != line:
            raise BadInput(f"{path} names {one.file.name} twice, in lines {before} and {line}; remove one of them")


def _csv_rows(path: Path) -> tuple[list[Row], list[str]]:
    try:
        text = read_bytes(path, _MOST).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read ({error})") from None
    head = text.partition("\n")[0]
    delimiter = max(",;\t", key=head.count)
    reader = csv.reader(io.StringIO(text), delimiter=delimiter)
    try:
        columns = [name.strip() for name in next(reader, [])]
        rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(map(str.strip, row))]
    except csv.Error as error:
        raise BadInput(f"{path}, line {reader.line_num}: {error}") from None
    if twice := next((name for name in columns if columns.count(name) > 1), None):
        raise BadInput(f"{path} has two columns {twice!r}; rename one")
    for line, row in rows:
        if len(row) != len(columns):
            raise BadInput(f"{path}, line {line} has {len(row)} cells, and there are {len(columns)} columns")
    return [(line, dict(zip(columns, row, strict=True))) for line, row in rows], columns


def _parquet_rows(path: Path) -> tuple[list[Row], list[str]]:
    table = parquet(path)
    columns = {name: [_text(value) for value in table[name].to_pylist()] for name in table.column_names}
    return [
        (line + 1, {name: cells[line] for name, cells in columns.items()}) for line in range(table.num_rows)
    ], table.column_names


def _text(value: Any) -> str:
    """As it would stand in a CSV file."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()
