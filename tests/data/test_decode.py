"""Image files as hospitals and cameras write them, against arithmetic by hand."""

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dicoms import SECRET, write_dicom
from fedlens.data import decode as module
from fedlens.data.decode import Decoding, PassedOver, Unreadable, decode

RANDOM = np.random.default_rng(7)
GRAY = Decoding("L")


def read(image, kind="PNG", wanted=GRAY, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    file.seek(0)
    array, about = decode(file, wanted)
    return array[:, :, 0] if array.shape[2] == 1 else array, about


def by_hand(values, low, high):
    """From low, black, to high, white, a pixel at a time."""
    out = [min(max((float(v) - low) / (high - low), 0.0), 1.0) * 255 for v in values.ravel()]
    return np.array([round(v) for v in out], np.uint8).reshape(values.shape)


# ---- more than eight bits --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize("bits", [8, 10, 12, 14, 16])
def test_gray_of_sixteen_bits(kind, bits):
    values = RANDOM.integers(0, 1 << bits, (9, 7)).astype(np.uint16)
    values[0, 0] = (1 << bits) - 1
    found, about = read(Image.fromarray(values), kind)
    assert (found == by_hand(values, 0, (1 << bits) - 1)).all() and about.kinds == [f"of 16 bits ({bits} used)", "gray"]
    assert len(np.unique(found)) > 20  # they were all white before


def test_bits_that_are_declared_are_the_same_for_all():
    dark = np.full((4, 4), 300, np.uint16)
    assert (read(Image.fromarray(dark), wanted=Decoding("L", bits=16))[0] == round(300 * 255 / 65535)).all()
    with pytest.raises(Unreadable, match=r"up to 300, and data.bits=8 go to 255; raise data.bits"):
        read(Image.fromarray(dark), wanted=Decoding("L", bits=8))


def test_thirty_two_bits_and_decimals():
    whole = RANDOM.integers(0, 4096, (5, 5)).astype(np.int32)
    whole[0, 0] = 4095
    assert (read(Image.fromarray(whole), "TIFF")[0] == by_hand(whole, 0, 4095)).all()
    with pytest.raises(Unreadable, match="from -3 to"):
        read(Image.fromarray(np.where(whole > 4000, -3, whole).astype(np.int32)), "TIFF")
    parts = RANDOM.random((5, 5)).astype(np.float32)
    assert (read(Image.fromarray(parts), "TIFF")[0] == by_hand(parts, 0, 1)).all()
    with pytest.raises(Unreadable, match="decimal numbers from 0 to 7"):
        read(Image.fromarray(parts.round() * 7), "TIFF")


def test_big_endian_tiff():
    values = RANDOM.integers(0, 65536, (6, 5)).astype(">u2")
    values[0, 0] = 65535
    head = b"MM\0*\0\0\0\x08\0\x08"
    entries = [(256, 3, 5 << 16), (257, 3, 6 << 16), (258, 3, 16 << 16), (259, 3, 1 << 16), (262, 3, 1 << 16)]
    entries += [(273, 4, 10 + 8 * 12 + 4), (278, 3, 6 << 16), (279, 4, 60)]
    body = b"".join(
        tag.to_bytes(2, "big") + kind.to_bytes(2, "big") + (1).to_bytes(4, "big") + v.to_bytes(4, "big")
        for tag, kind, v in entries
    )
    found, _ = decode(io.BytesIO(head + body + b"\0\0\0\0" + values.tobytes()), GRAY)
    assert (found[:, :, 0] == by_hand(values, 0, 65535)).all()


# ---- as cameras and web pages have them ------------------------------------------------------------------------------
TURNS = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a.transpose(1, 0, 2)[::-1, ::-1],
    8: lambda a: np.rot90(a, 1),
}


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_exif_orientation(turn, kind):
    pixels = RANDOM.integers(0, 256, (4, 6, 3), np.uint8)
    image = Image.fromarray(pixels)
    exif = image.getexif()
    exif[0x0112] = turn
    found, about = read(image, kind, Decoding("RGB"), exif=exif)
    assert (found == TURNS[turn](pixels)).all()
    assert (about.height, about.width) == found.shape[:2] and ("EXIF" in " ".join(about.kinds)) == (turn > 1)


def test_transparency_becomes_black_and_opaque_pixels_stay():
    pixels = RANDOM.integers(0, 256, (5, 5, 4), np.uint8)
    found, about = read(Image.fromarray(pixels), wanted=Decoding("RGB"))
    expected = [[[round(int(c) * int(p[3]) / 255) for c in p[:3]] for p in row] for row in pixels]
    assert (found == np.array(expected)).all() and "transparent" in about.kinds[0]
    pixels[:, :, 3] = 255
    found, about = read(Image.fromarray(pixels), wanted=Decoding("RGB"))
    assert (found == pixels[:, :, :3]).all() and about.kinds == ["colour"]


def test_palette_with_a_transparent_colour():
    image = Image.fromarray(np.array([[0, 1], [1, 0]], np.uint8))
    image = image.convert("P")
    image.putpalette([200, 10, 20, 30, 40, 50])
    found, _ = read(image, wanted=Decoding("RGB"), transparency=0)
    assert found.tolist() == [[[0, 0, 0], [30, 40, 50]], [[30, 40, 50], [0, 0, 0]]]


def test_gray_and_colour_and_pages_are_told():
    gray = Image.fromarray(RANDOM.integers(0, 256, (4, 4), np.uint8))
    assert read(gray)[1].kinds == ["gray"] and read(gray.convert("RGB"))[1].kinds == ["colour"]
    assert read(gray, "TIFF", save_all=True, append_images=[gray])[1].kinds[0].startswith("with several pages")


@pytest.mark.parametrize("resize", ["crop", "fit", "pad"])
def test_every_way_to_a_square(resize):
    pixels = RANDOM.integers(1, 256, (8, 16), np.uint8)
    found, _ = read(Image.fromarray(pixels), wanted=Decoding("L", 4, resize))
    blocks = pixels.astype(float)
    if resize == "crop":
        expected = blocks[:, 4:12].reshape(4, 2, 4, 2).mean((1, 3))
    elif resize == "pad":
        expected = np.zeros((4, 4))
        expected[1:3] = blocks.reshape(2, 4, 4, 4).mean((1, 3))
    else:
        expected = np.asarray(Image.fromarray(pixels).resize((4, 4), Image.Resampling.BILINEAR), float)
    assert found.shape == (4, 4) and np.abs(found - expected).max() <= 0.5


# ---- DICOM -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def dicom(tmp_path):
    pytest.importorskip("pydicom")

    def write_and_read(values, wanted=GRAY, **tags):
        array, about = decode(write_dicom(tmp_path / "one.dcm", values, **tags), wanted)
        return array[:, :, 0] if array.shape[2] == 1 else array, about

    return write_and_read


def test_twelve_bits_in_sixteen(dicom):
    values = RANDOM.integers(0, 4096, (6, 5)).astype(np.uint16)
    found, about = dicom(values, BitsStored=12)
    assert (found == by_hand(values, 0, 4095)).all() and about.kinds == ["DICOM", "gray"]
    assert (dicom(values, BitsStored=12, PhotometricInterpretation="MONOCHROME1")[0] == 255 - found).all()
    # Some scanners write graphics into the four bits above.
    assert (dicom(values | 0xA000, BitsStored=12)[0] == found).all()


def test_rescaled_signed_values(dicom):
    values = RANDOM.integers(-1000, 1000, (6, 5)).astype(np.int16)
    found, _ = dicom(values, BitsStored=12, RescaleSlope=2, RescaleIntercept=-24)
    assert (found == by_hand(values * 2 - 24, -2048 * 2 - 24, 2047 * 2 - 24)).all()


@pytest.mark.parametrize("how", ["LINEAR", "LINEAR_EXACT", "SIGMOID"])
def test_windows_as_pydicom_sees_them(dicom, how, tmp_path):
    import pydicom
    from pydicom.pixels import apply_modality_lut, apply_voi_lut

    values = RANDOM.integers(0, 4096, (9, 9)).astype(np.uint16)
    tags = dict(BitsStored=12, RescaleSlope=1, RescaleIntercept=-1024, VOILUTFunction=how)
    found, _ = dicom(values, WindowCenter=[40, 600], WindowWidth=[400, 1500], **tags)
    ds = pydicom.dcmread(tmp_path / "one.dcm")
    shown = apply_voi_lut(apply_modality_lut(values, ds), ds, index=0)
    low, high = -1024, 4095 - 1024  # what pydicom spreads a window over
    assert np.abs(found - (shown - low) / (high - low) * 255).max() <= 0.5 + 1e-6


def test_a_table_of_gray_values(dicom, tmp_path):
    from pydicom.dataset import Dataset

    table = Dataset()
    table.LUTDescriptor, table.LUTData = [16, 0, 8], np.arange(0, 256, 16, "<u2").tobytes()
    values = RANDOM.integers(0, 16, (4, 4)).astype(np.uint8)
    found, _ = dicom(values, BitsStored=4, VOILUTSequence=[table])
    assert (found == values * 16).all()


def test_colour(dicom):
    values = RANDOM.integers(0, 256, (5, 4, 3), np.uint8)
    found, about = dicom(values, Decoding("RGB"))
    assert (found == values).all() and "colour" in about.kinds


def test_patients_are_hashes_with_salt(dicom):
    values = np.zeros((4, 4), np.uint8)
    salted = [dicom(values, Decoding("L", salt=salt), patient=who)[1].patient for salt, who in ("aP", "aP", "bP", "aQ")]
    assert salted[0] == salted[1] and len(set(salted)) == 3 and all(len(each) == 128 for each in salted)
    nobody = dicom(values, patient="")[1]
    assert nobody.patient == "" and "DICOM without a PatientID" in nobody.kinds


def test_compressed(dicom, monkeypatch):
    import pydicom.pixels
    from pydicom.uid import RLELossless

    values = RANDOM.integers(0, 4096, (8, 8)).astype(np.uint16)
    found, about = dicom(values, BitsStored=12, syntax=RLELossless)
    assert (found == by_hand(values, 0, 4095)).all() and about.kinds[0] == "DICOM (RLE Lossless)"

    def unknown(syntax):
        raise NotImplementedError

    monkeypatch.setattr(pydicom.pixels, "get_decoder", unknown)
    with pytest.raises(PassedOver, match="DICOM compressed as RLE Lossless, which nothing here can unpack"):
        dicom(values, BitsStored=12, syntax=RLELossless)

    class Lacking:
        is_available = False

    monkeypatch.setattr(pydicom.pixels, "get_decoder", lambda syntax: Lacking)
    with pytest.raises(PassedOver, match=r"RLE Lossless, for which pip install 'fedlens\[dicom\]' has a decoder"):
        dicom(values, BitsStored=12, syntax=RLELossless)


def test_what_is_no_single_image(dicom, tmp_path):
    with pytest.raises(Unreadable, match="DICOM file of 3 frames; save the frames you need one by one"):
        dicom(np.zeros((3, 4, 4), np.uint8))
    with pytest.raises(Unreadable, match=r"truncated DICOM file .its pixels end after 3,996 of 5,000 bytes"):
        whole = len(write_dicom(tmp_path / "w.dcm", np.zeros((50, 50), np.uint16)).read_bytes())
        dicom(np.zeros((50, 50), np.uint16), keep=whole - 1004)
    with pytest.raises((Unreadable, PassedOver)) as problem:
        dicom(np.zeros((50, 50), np.uint16), keep=300)
    assert SECRET not in str(problem.value)


def test_without_pydicom_the_sentence_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(Unreadable, match=r"pip install 'fedlens\[dicom\]'"):
        decode(io.BytesIO(bytes(128) + b"DICM" + bytes(100)), GRAY)


# ---- by itself -------------------------------------------------------------------------------------------------------
def test_the_file_stands_alone(tmp_path):
    """It is copied beside exported models, and run by processes that know nothing of the package."""
    (tmp_path / "decode.py").write_bytes(Path(module.__file__).read_bytes())
    Image.fromarray(np.full((8, 8), 4095, np.uint16)).save(tmp_path / "a.png")
    code = "import sys, decode; print(decode.decode('a.png')[0].max(), [m for m in sys.modules if 'fedlens' in m])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env={})
    assert done.stdout == "255 []\n", done.stderr
