"""Pictures that other commands left in a run, made small enough to travel inside a page."""

from __future__ import annotations

import base64
import io
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ..core.files import open_regular

BUDGET = 3_000_000  # characters of all pictures together: a page must fit into a mail
_WIDEST = 1100  # pixels
KINDS = {  # how names begin -> what there is to see; in this order
    "explain-weights": "How much each client counts",
    "explain-saliency": "What clients' models look at",
    "explain": "What the model looks at",
    "audit-": "What an attack recovers",
    "clients-confusion": "Which classes are mistaken for which",
}


class Pictures:
    """Embeds pictures until the budget is spent; the rest are named, and stay where they are."""

    def __init__(self, budget: int = BUDGET):
        self.left = budget
        self.left_out: list[str] = []

    def of(self, folder: Path, run: str, leaking: Collection[str] = ()) -> list[dict[str, Any]]:
        """Those of a run; `leaking`: attacks that found more than chance, whose pictures are marked."""
        found = []
        for path in sorted(folder.glob("*.png")) if folder.is_dir() else ():
            kind = next((words for start, words in KINDS.items() if path.stem.startswith(start)), None)
            if kind is None:
                continue
            address, width, height = embedded(path)
            if not address or len(address) > self.left:
                self.left_out.append(f"{run}/figures/{path.name}")
                continue
            self.left -= len(address)
            more = path.stem.partition("-")[2].replace("-", " ")
            about = f"{kind}, run {run}" + (f" ({more})" if more else "")
            kept = {"about": about, "kind": "audit" if path.stem.startswith("audit") else "map"}
            leak = kept["kind"] == "audit" and path.stem.removeprefix("audit-") in leaking
            found.append({**kept, "leak": leak, "source": address, "width": str(width), "height": str(height)})
        return found


def embedded(path: Path) -> tuple[str, int, int]:
    """(data address, width, height) of a smaller copy; an empty address where the file is no picture."""
    from PIL import Image

    try:
        with open_regular(path) as file, Image.open(file) as opened:
            picture = opened.convert("RGB")
    except MemoryError:
        raise
    except Exception:  # a damaged picture can raise anything
        return "", 0, 0
    if picture.width > _WIDEST:
        picture = picture.resize((_WIDEST, round(picture.height * _WIDEST / picture.width)), Image.Resampling.LANCZOS)
    written = io.BytesIO()
    picture.save(written, "WEBP", quality=82)
    return f"data:image/webp;base64,{base64.b64encode(written.getvalue()).decode()}", picture.width, picture.height
