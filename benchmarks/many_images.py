"""A folder of many small JPEGs, decoded once and opened again: seconds, peak memory, and what a second start takes.

`python benchmarks/many_images.py` makes 100,000 files by repeating real images (Tiny-ImageNet's where FEDLENS_DATA has
it, else the embedded digits), and measures each start in a process of its own. `--page results/images.md` writes what
was found; with `--read FILE.json` that of an earlier measurement.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

START = """
import json, resource, sys, threading, time
from fedlens.data.sources.folders import Folder

peak = {}
def watch():
    while True:
        for line in open("/proc/self/status"):
            name, _, value = line.partition(":")
            if name in ("VmRSS", "RssAnon"):
                peak[name] = max(peak.get(name, 0), int(value.split()[0]) / 1024)
        time.sleep(0.02)

threading.Thread(target=watch, daemon=True).start()
time.sleep(0.1)
before = dict(peak)
start = time.perf_counter()
images = Folder(sys.argv[1], size=32).load()
seconds = time.perf_counter() - start
own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps({
    "images": len(images), "seconds": round(seconds, 2),
    "cpu_seconds": round(own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime, 1),
    "anonymous_mib_before": round(before["RssAnon"]), "anonymous_mib_peak": round(peak["RssAnon"]),
    "resident_mib_peak": round(peak["VmRSS"]), "largest_child_mib": round(children.ru_maxrss / 1024),
    "checksum": images.checksum[:16],
}))
"""


def contents() -> list[bytes]:
    """Real images as JPEG files."""
    pack = Path(os.environ.get("FEDLENS_DATA") or "/nowhere") / "tiny_imagenet" / "train.parquet"
    if pack.is_file():
        import pyarrow.parquet

        return pyarrow.parquet.read_table(pack, columns=["jpeg"])["jpeg"].to_pylist()
    from PIL import Image

    from fedlens.data.sources.small import Mnist5k

    found = []
    for pixels in Mnist5k().load().x[:, 0].numpy():
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG")
        found.append(file.getvalue())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--json", default="")
    parser.add_argument("--read", default="")
    parser.add_argument("--page", default="")
    asked = parser.parse_args()
    rows = json.loads(Path(asked.read).read_text("utf-8")) if asked.read else measured(asked.count)
    if asked.json:
        Path(asked.json).parent.mkdir(parents=True, exist_ok=True)
        Path(asked.json).write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
    if asked.page:
        Path(asked.page).write_text(page(rows), "utf-8")


def measured(count: int) -> dict[str, dict[str, Any]]:
    """The first start, which decodes, and the second."""
    with tempfile.TemporaryDirectory() as place:
        some = contents()
        for n in range(count):
            folder = Path(place) / "set" / f"class{n % 10}"
            if n < 10:
                folder.mkdir(parents=True)
            (folder / f"{n:06}.jpg").write_bytes(some[n % len(some)])
        rows = {}
        for start in ("first", "second"):
            environment = {**os.environ, "FEDLENS_CACHE": f"{place}/cache"}
            command = [sys.executable, "-c", START, f"{place}/set"]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
            rows[start] = json.loads(done.stdout)
            print(start, rows[start], flush=True)
    return {**rows, "machine": {"cores": len(os.sched_getaffinity(0)), "load": round(os.getloadavg()[1], 1)}}


def page(rows: dict[str, dict[str, Any]]) -> str:
    first, second = rows["first"], rows["second"]
    same = "the same" if first["checksum"] == second["checksum"] else "OTHER"
    names = {
        "seconds": "seconds by the clock",
        "cpu_seconds": "CPU seconds, all processes",
        "anonymous_mib_peak": "memory of its own at most, MiB",
        "anonymous_mib_before": "of these before it began, MiB",
        "resident_mib_peak": "resident at most, MiB, mapped files included",
        "largest_child_mib": "largest process that decodes, MiB",
    }
    lines = [f"| {said} | {first[name]} | {second[name]} |" for name, said in names.items()]
    machine = rows["machine"]
    return "\n".join(
        [
            "# Many small images",
            "",
            f"Decoding {first['images']:,} JPEG files took {first['cpu_seconds']:.0f} seconds of the processor, once; "
            f"a later start takes {second['cpu_seconds']:.0f}. Memory of its own was {first['anonymous_mib_peak']} MiB "
            f"at most, and {first['anonymous_mib_before']} before it began; each process that decodes has "
            f"{first['largest_child_mib']} MiB at most.",
            "",
            "The files are real images, repeated, in a folder for each of ten classes, and made 32 x 32. "
            f"{machine['cores']} cores, shared with other programs: the mean load of the last five minutes was "
            f"{machine['load']} at the end. Seconds by the clock say as much of that load as of the work.",
            "",
            "| measured | first start (decodes) | second start |",
            "| --- | ---: | ---: |",
            *lines,
            "",
            f"Both starts give {same} images, by their checksum. Written by "
            "`python benchmarks/many_images.py --json results/data/images.json --page results/images.md`.",
            "",
        ]
    )


if __name__ == "__main__":
    main()
