"""One image file as bytes, whatever hospitals and cameras write. This file imports nothing of the package: processes
that decode run it by itself, and so can programs without fedlens.

`decode(path)` returns the pixels and what there is to say of the file. It raises `Unreadable` with a sentence, or
`PassedOver` with the kind of file that is left out. Tags of a DICOM file never leave it, but for a salted hash.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import sys
import warnings
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

DICOM_ENDINGS = (".dcm", ".dicom", ".dic")
ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", *DICOM_ENDINGS)
_DEPTHS = (8, 10, 12, 14, 16)  # bits that scanners use
_ORIENTATION = 0x0112  # EXIF


class Unreadable(ValueError):
    """A file that cannot be used: what is wrong with it, to follow its name."""


class PassedOver(ValueError):
    """A file that is left out and counted: of which kind it is."""


@dataclass(frozen=True)
class Decoding:
    """What images are made into."""

    mode: str = "RGB"  # or L
    size: int = 0  # pixels of the square; 0: as they are
    resize: str = "crop"  # to the middle square; fit: stretched; pad: whole, on black
    bits: int = 0  # of gray images with 16; 0: of 8, 10, 12, 14 and 16 the fewest that hold the image
    salt: str = ""  # of the hash of a patient's name


@dataclass
class About:
    """What there is to say of a file, in words that can be counted."""

    height: int
    width: int
    kinds: list[str] = field(default_factory=list)
    patient: str = ""  # the salted hash; empty: no DICOM file, or it does not say


AS_IT_IS = Decoding()


def decode(file: Any, wanted: Decoding = AS_IT_IS) -> tuple[np.ndarray, About]:
    """(bytes [H, W, C], what there is to say) of a path or an open file."""
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(_regular(file)) if isinstance(file, str | os.PathLike) else file
        try:
            head = opened.read(132)
            opened.seek(0)
            image, about = _dicom(opened, wanted) if head[128:] == b"DICM" else _picture(opened, wanted)
            about.width, about.height = image.size
            array = np.asarray(_resized(image.convert(wanted.mode), wanted))
        except (Unreadable, PassedOver, MemoryError):
            raise
        except Exception as error:  # a damaged picture can raise anything
            raise Unreadable(f"cannot be decoded ({error}); replace or remove it") from None
    return array if array.ndim == 3 else array[:, :, None], about


@contextlib.contextmanager
def _regular(path: Any):
    """A pipe in place of a file might never end."""
    try:
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        raise Unreadable(f"cannot be decoded ({error.strerror}); replace or remove it") from None
    with open(number, "rb") as file:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise Unreadable("cannot be decoded (it is not a regular file); replace or remove it")
        yield file


# ---- pictures --------------------------------------------------------------------------------------------------------
def _picture(opened: Any, wanted: Decoding) -> tuple[Any, About]:
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        image = Image.open(opened)
    except UnidentifiedImageError:
        raise Unreadable("is not an image; replace or remove it") from None
    kinds = []
    if getattr(image, "n_frames", 1) > 1 and image.format != "MPO":
        kinds.append("with several pages, of which the first is used")
    raw = image.tile[0][3] if image.tile else ""
    if "16" in str(raw) and image.mode in ("RGB", "RGBA"):
        kinds.append("of 16-bit colour, read to 8 bits")
    if image.getexif().get(_ORIENTATION, 1) not in (0, 1):
        image = ImageOps.exif_transpose(image)
        kinds.append("turned by their EXIF orientation")
    if image.mode.startswith("I") or image.mode == "F":
        image, kind = _deep(image, wanted.bits)
        kinds.append(kind)
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image, clear = _on_black(image)
        kinds += ["with transparent parts, which become black"] if clear else []
    grey = image.mode in ("1", "L", "LA") or (image.mode == "P" and _grey_palette(image))
    return image, About(0, 0, [*kinds, "gray" if grey else "colour"])


def _grey_palette(image: Any) -> bool:
    colours = np.array(image.getpalette("RGB") or [0, 0, 0]).reshape(-1, 3)
    return bool((colours == colours[:, :1]).all())


def _deep(image: Any, bits: int) -> tuple[Any, str]:
    """An image with more than eight bits a pixel as one of eight, and what was done."""
    from PIL import Image

    values = np.asarray(image)
    low, high = values.min(), values.max()
    if image.mode == "F":
        if not (np.isfinite(values).all() and low >= 0 and high <= 1):
            raise Unreadable(f"holds decimal numbers from {low:g} to {high:g}, not from 0 to 1; save it with 16 bits")
        return Image.fromarray(np.round(values * 255).astype(np.uint8)), "of decimal numbers"
    if low < 0 or high > 65535:
        raise Unreadable(f"holds numbers from {low} to {high}, which 16 bits do not hold; save it with 16 bits")
    used = bits or next(depth for depth in _DEPTHS if high < 1 << depth)
    if high >= 1 << used:
        raise Unreadable(f"holds numbers up to {high}, and data.bits={bits} go to {(1 << bits) - 1}; raise data.bits")
    levels = np.arange(1 << used) * 255 / ((1 << used) - 1)
    return Image.fromarray(np.round(levels).astype(np.uint8)[values]), f"of 16 bits ({used} used)"


def _on_black(image: Any) -> tuple[Any, bool]:
    """Without its alpha channel, and whether something was transparent; colours under what is opaque stay exact."""
    from PIL import Image

    grey = image.mode in ("1", "L", "LA", "La")
    both = np.asarray(image.convert("LA" if grey else "RGBA"))
    alpha = both[:, :, -1:].astype(float) / 255
    if (alpha == 1).all():
        return image.convert("L" if grey else "RGB"), False
    shown = np.round(both[:, :, :-1] * alpha).astype(np.uint8)
    return Image.fromarray(shown[:, :, 0] if grey else shown), True


# ---- DICOM -----------------------------------------------------------------------------------------------------------
def _dicom(opened: Any, wanted: Decoding) -> tuple[Any, About]:
    from PIL import Image

    try:
        import pydicom  # pyright: ignore[reportMissingImports]
        from pydicom.pixels import apply_color_lut, pixel_array  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise Unreadable("is a DICOM file, which needs: pip install 'fedlens[dicom]'") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they may quote tags
        tags = _tags(pydicom, opened)
        kind = f"DICOM{_compression(pydicom, tags)}"
        try:
            values = pixel_array(tags)
            if tags.PhotometricInterpretation == "PALETTE COLOR":
                values = apply_color_lut(values, tags)
                values = np.round(values / 257).astype(np.uint8) if values.dtype != np.uint8 else values
        except Exception as error:  # of many kinds, and their words may quote tags
            raise Unreadable(f"is a damaged DICOM file ({type(error).__name__}); replace or remove it") from None
        if values.ndim == 3:
            shown = values if values.dtype == np.uint8 else _stretched(values.astype(float), *_stored_range(tags))
        else:
            shown = _shown(values, tags)
    patient = str(tags.get("PatientID") or "").strip()
    named = hashlib.blake2b(patient.encode(), key=wanted.salt.encode()[:64]).hexdigest() if patient else ""
    kinds = [kind, "colour" if values.ndim == 3 else "gray", *([] if patient else ["DICOM without a PatientID"])]
    return Image.fromarray(shown), About(0, 0, kinds, named)


def _tags(pydicom: Any, opened: Any) -> Any:
    """All of a file; refused where there is more than one image in it, or less."""
    try:
        tags = pydicom.dcmread(opened)
    except Exception as error:
        raise Unreadable(f"is a damaged DICOM file ({type(error).__name__}); replace or remove it") from None
    if "PixelData" not in tags and "Rows" not in tags:
        raise PassedOver("DICOM without an image")
    if (frames := int(tags.get("NumberOfFrames") or 1)) > 1:
        raise Unreadable(f"is a DICOM file of {frames} frames; save the frames you need one by one")
    needed = ("PixelData", "Rows", "Columns", "BitsAllocated", "BitsStored", "PhotometricInterpretation")
    if lacking := [name for name in needed if name not in tags]:
        raise Unreadable(f"is a damaged DICOM file (it has no {lacking[0]}); replace or remove it")
    size = tags.Rows * tags.Columns * int(tags.get("SamplesPerPixel") or 1) * tags.BitsAllocated // 8
    compressed = getattr(tags.file_meta.get("TransferSyntaxUID"), "is_compressed", False)
    half = tags.PhotometricInterpretation == "YBR_FULL_422"  # two pixels share their colours
    if not compressed and not half and len(tags.PixelData) < size:
        found = f"its pixels end after {len(tags.PixelData):,} of {size:,} bytes"
        raise Unreadable(f"is a truncated DICOM file ({found}); replace or remove it")
    return tags


def _compression(pydicom: Any, tags: Any) -> str:
    """How its pixels are packed, in words; passed over where nothing here unpacks them."""
    syntax = tags.file_meta.get("TransferSyntaxUID")
    if syntax is None or not syntax.is_compressed:
        return ""
    what = f"DICOM compressed as {syntax.name}"
    try:
        decoder = pydicom.pixels.get_decoder(syntax)
    except NotImplementedError:
        raise PassedOver(f"{what}, which nothing here can unpack") from None
    if not decoder.is_available:
        raise PassedOver(f"{what}, for which pip install 'fedlens[dicom]' has a decoder")
    return f" ({syntax.name})"


def _shown(values: np.ndarray, tags: Any) -> np.ndarray:
    """Gray values as a screen shows them: rescaled, seen through the file's window or over its whole range."""
    from pydicom.pixels import apply_modality_lut, apply_voi  # pyright: ignore[reportMissingImports]

    low, high = _stored_range(tags)
    signed = bool(tags.get("PixelRepresentation"))
    kind = np.int64 if signed else np.uint64
    ends = apply_modality_lut(np.array([[low, high]], kind), tags).ravel().astype(float)
    if "ModalityLUTSequence" in tags:
        depth = int(tags.ModalityLUTSequence[0].LUTDescriptor[2])
        ends = np.array([0.0, (1 << depth) - 1])
    real = apply_modality_lut(values, tags)
    if "VOILUTSequence" in tags:
        depth = int(tags.VOILUTSequence[0].LUTDescriptor[2])
        out = _stretched(apply_voi(real.astype(np.int64), tags).astype(float), 0, (1 << depth) - 1)
    elif _number(tags.get("WindowWidth")) is not None and _number(tags.get("WindowCenter")) is not None:
        out = _windowed(real.astype(float), tags)
    else:
        out = _stretched(real.astype(float), ends.min(), ends.max())
    return 255 - out if tags.PhotometricInterpretation == "MONOCHROME1" else out


def _stored_range(tags: Any) -> tuple[int, int]:
    bits = int(tags.BitsStored)
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if tags.get("PixelRepresentation") else (0, (1 << bits) - 1)


def _windowed(values: np.ndarray, tags: Any) -> np.ndarray:
    """Through the first window of the file (DICOM PS3.3, C.11.2.1.2 and C.11.2.1.3)."""
    centre, width = _number(tags.WindowCenter), _number(tags.WindowWidth)
    assert centre is not None and width is not None
    kind = str(tags.get("VOILUTFunction") or "LINEAR")
    if kind == "SIGMOID" and width > 0:
        with np.errstate(over="ignore"):
            return np.round(255 / (1 + np.exp(-4 * (values - centre) / width))).astype(np.uint8)
    if kind == "LINEAR_EXACT":
        return _stretched(values, centre - width / 2, centre + width / 2)
    return _stretched(values, centre - 0.5 - (width - 1) / 2, centre - 0.5 + (width - 1) / 2)


def _number(value: Any) -> float | None:
    """The first of several."""
    first = value[0] if isinstance(value, list | tuple) or type(value).__name__ == "MultiValue" else value
    return None if first is None or first == "" else float(first)


def _stretched(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """From `low`, black, to `high`, white."""
    if high <= low:
        return np.where(values <= low, 0, 255).astype(np.uint8)
    return np.round(np.clip((values - low) / (high - low), 0, 1) * 255).astype(np.uint8)


# ---- sizes -----------------------------------------------------------------------------------------------------------
def _resized(image: Any, wanted: Decoding) -> Any:
    """At this size; where whole blocks of pixels become one, their mean."""
    from PIL import Image

    size, longer = wanted.size, max(image.size)
    if not size:
        return image
    if wanted.resize == "fit":
        return _scaled(image, (size, size))
    if wanted.resize == "pad":
        small = _scaled(image, tuple(max(1, round(side * size / longer)) for side in image.size))
        out = Image.new(image.mode, (size, size))
        out.paste(small, ((size - small.width) // 2, (size - small.height) // 2))
        return out
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return _scaled(image.crop((left, top, left + side, top + side)), (size, size))


def _scaled(image: Any, size: tuple[int, ...]) -> Any:
    from PIL import Image

    factors = {(side // want, side % want) for side, want in zip(image.size, size, strict=True)}
    if len(factors) == 1 and next(iter(factors))[1] == 0:
        return image.reduce(next(iter(factors))[0])
    return image.resize(size, Image.Resampling.BILINEAR)


# ---- a process that decodes ------------------------------------------------------------------------------------------
def try_one(file: Any, wanted: Decoding) -> tuple[np.ndarray | None, dict[str, Any]]:
    """(pixels [C, H, W] or nothing, what to say of the file or why it cannot be read), for whoever counts."""
    try:
        pixels, about = decode(file, wanted)
        return pixels.transpose(2, 0, 1), asdict(about)
    except Unreadable as problem:
        return None, {"problem": str(problem)}
    except PassedOver as kind:
        return None, {"skipped": str(kind)}


def serve(room: int) -> None:
    """Decode what the standard input names into a file that is open already, until there is no more."""
    lines = iter(sys.stdin)
    told = json.loads(next(lines))
    wanted, shape = Decoding(**told["wanted"]), tuple(told["shape"])
    with open(room, "r+b") as file:
        x = np.memmap(file, np.uint8, "r+", shape=shape)
        for line in lines:
            said = []
            for index, path in json.loads(line):
                pixels, about = try_one(path, wanted)
                if pixels is not None and pixels.shape != shape[1:]:
                    pixels, about = None, {"other_size": True}
                if pixels is not None:
                    x[index] = pixels
                said.append(about)
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
