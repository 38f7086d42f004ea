"""An exported model on the Hugging Face hub, with the extra `hub`."""

from __future__ import annotations

import re
from pathlib import Path

from ..core.errors import BadInput
from ..core.format import size

_COMPILED = "__pycache__"  # whoever tried predict.py has it in the folder


def check_push(name: str, dry_run: bool = False) -> None:
    """Refuses a name that the hub does not take, and a machine without the library, before anything is written."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise BadInput(f"--push is {name!r}, but it should be USER/NAME on the Hugging Face hub")
    if dry_run:
        return
    try:
        import huggingface_hub  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]
    except ImportError:
        raise BadInput("--push uploads to the Hugging Face hub: pip install 'fedlens[hub]'") from None


def would_send(place: Path, name: str, private: bool = False) -> list[str]:
    """A line for each file that `upload` sends; nobody is asked."""
    files = sorted(path for path in place.rglob("*") if path.is_file() and _COMPILED not in path.parts)
    whose = "private" if private else "public"
    lines = [f"{path.relative_to(place).as_posix()}, {size(path.stat().st_size)}" for path in files]
    return [f"would send to the {whose} model {name} on the Hugging Face hub:", *lines]


def upload(place: Path, name: str, private: bool = False) -> str:
    """The address of the model on the hub; refused in a sentence where the hub does not take it."""
    from huggingface_hub import HfApi  # pyright: ignore[reportMissingImports]

    api = HfApi()
    try:
        api.create_repo(name, repo_type="model", private=private, exist_ok=True)
        api.upload_folder(
            folder_path=str(place),
            repo_id=name,
            repo_type="model",
            commit_message="Upload a model of FedLens",
            ignore_patterns=[f"**/{_COMPILED}/**", f"{_COMPILED}/**"],
        )
    except Exception as error:  # offline, no token, no access: the hub has a dozen classes for these
        first = str(error).strip().partition("\n")[0]
        raise BadInput(f"{place} is written, but the hub did not take it: {first}") from None
    return f"{api.endpoint}/{name}"
