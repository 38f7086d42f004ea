"""Hostile clients, and what a server can do about them: defences of a round's uploads, attacks that test these."""

from .aggregators import Claims, ClipUploads, GeometricMedian, Krum, Median, MultiKrum, TrimmedMean
from .attacks import ATTACKS, Attack, Backdoor, LabelFlip, Noise, SignFlip
from .defence import Defence

DEFENCES = {
    defence.name: defence for defence in (Claims, ClipUploads, GeometricMedian, Krum, Median, MultiKrum, TrimmedMean)
}

__all__ = [
    "ATTACKS",
    "DEFENCES",
    "Attack",
    "Backdoor",
    "Claims",
    "ClipUploads",
    "Defence",
    "GeometricMedian",
    "Krum",
    "LabelFlip",
    "Median",
    "MultiKrum",
    "Noise",
    "SignFlip",
    "TrimmedMean",
]
