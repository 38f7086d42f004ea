"""DICOM files as scanners write them, with somebody's name in them."""

import numpy as np

SECRET = "MUSTERMANN^ERIKA"


def write_dicom(path, values, patient="P-1", keep=None, **tags):
    """One image; `keep`: only the first bytes of the file."""
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, SecondaryCaptureImageStorage, generate_uid

    values = np.asarray(values)
    meta, ds = FileMetaDataset(), Dataset()
    meta.TransferSyntaxUID, meta.MediaStorageSOPClassUID = ExplicitVRLittleEndian, SecondaryCaptureImageStorage
    meta.MediaStorageSOPInstanceUID = ds.SOPInstanceUID = generate_uid()
    ds.SOPClassUID, ds.file_meta = SecondaryCaptureImageStorage, meta
    ds.PatientName, ds.PatientID = SECRET, patient
    colour = values.ndim == 3 and values.shape[-1] == 3
    ds.Rows, ds.Columns = values.shape[-3:-1] if colour else values.shape[-2:]
    ds.SamplesPerPixel = 3 if colour else 1
    if colour:
        ds.PlanarConfiguration = 0
    elif values.ndim == 3:
        ds.NumberOfFrames = len(values)
    ds.PhotometricInterpretation = "RGB" if colour else "MONOCHROME2"
    bits = 8 * values.dtype.itemsize
    ds.BitsAllocated, ds.BitsStored, ds.HighBit = bits, bits, bits - 1
    ds.PixelRepresentation = int(values.dtype.kind == "i")
    syntax = tags.pop("syntax", None)
    for name, value in tags.items():
        setattr(ds, name, value)
    ds.HighBit = ds.BitsStored - 1
    ds.PixelData = values.tobytes()
    if syntax is not None:
        ds.compress(syntax)
    path.parent.mkdir(parents=True, exist_ok=True)
    ds.save_as(path, enforce_file_format=True)
    if keep is not None:
        path.write_bytes(path.read_bytes()[:keep])
    return path
