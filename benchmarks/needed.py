"""What a measurement needs and a machine may lack: one sentence, and exit code 2."""

import importlib.util
import sys

import torch


def gpu(device: str) -> None:
    if device != "cpu" and not torch.cuda.is_available():
        _lacking("this needs a GPU, and torch finds none here; --device cpu shows that it works, not how fast")


def package(name: str, extra: str) -> None:
    if importlib.util.find_spec(name) is None:
        _lacking(f"this needs {name}, which is not installed: pip install {extra}")


def _lacking(sentence: str) -> None:
    print(sentence, file=sys.stderr)
    sys.exit(2)
