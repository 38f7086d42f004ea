"""results/images.md is what its script writes from the stored measurement, which shows what the page claims."""

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_has_the_numbers_of_its_measurement():
    rows = json.loads((ROOT / "results/data/images.json").read_text("utf-8"))
    page = runpy.run_path(str(ROOT / "benchmarks/many_images.py"))["page"]
    assert (ROOT / "results/images.md").read_text("utf-8") == page(rows)
    first, second = rows["first"], rows["second"]
    assert first["images"] == 100_000 and first["checksum"] == second["checksum"]
    assert second["cpu_seconds"] < first["cpu_seconds"]
