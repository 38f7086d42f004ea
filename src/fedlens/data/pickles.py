"""Pickle files of others, opened without running what is in them: numpy arrays and plain containers, nothing else."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..core.errors import BadInput
from ..core.files import open_regular
from .formats import check_memory

# Constructors only; none of them calls anything that a file could name.
_SAFE = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy.core.numeric", "_frombuffer"),
    ("_codecs", "encode"),
}


_Unpickler: Any = pickle._Unpickler  # the one in Python, whose steps can be looked at


class _Plain(_Unpickler):
    dispatch: ClassVar = dict(_Unpickler.dispatch)

    def load_build(self) -> None:
        kind, state = self.stack[-2:]
        if isinstance(kind, np.dtype) and not _is_sound(kind, state):  # numpy would trust it, and print a traceback
            raise pickle.UnpicklingError("its numbers are of no type that numpy writes")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        # numpy 2 renamed numpy.core; both spellings mean the same functions.
        if (module.replace("numpy._core", "numpy.core"), name) not in _SAFE:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def _is_sound(kind: np.dtype, state: Any) -> bool:
    """Whether numpy would have written this beside the name of the type."""
    _, _, *parts, size, _, flags = state[:8]
    return parts == [None] * 3 and size in (-1, kind.itemsize) and flags == kind.flags


def unpickled(raw: bytes, path: Path, encoding: str = "ASCII") -> Any:
    """What the bytes of a pickle file stand for; BadInput when that is more than arrays and containers."""
    try:
        return _Plain(io.BytesIO(raw), encoding=encoding).load()
    except Exception as error:  # a damaged pickle can raise anything
        raise BadInput(f"{path} is damaged or not a plain data file ({error}); fetch it again") from None


def pickled_array(path: Path, key: str) -> Any:
    """The one object that np.savez stored under `key`."""
    try:
        with open_regular(path) as opened, zipfile.ZipFile(opened) as archive:
            check_memory(2 * archive.getinfo(f"{key}.npy").file_size, path)
            file = io.BytesIO(archive.read(f"{key}.npy"))
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        read(file)
    except (BadInput, MemoryError):
        raise
    except Exception as error:  # a damaged archive can raise anything
        raise BadInput(f"{path} is not a readable .npz file with the key {key!r} ({error})") from None
    array = unpickled(file.read(), path)
    return array.item() if isinstance(array, np.ndarray) and array.ndim == 0 else array
