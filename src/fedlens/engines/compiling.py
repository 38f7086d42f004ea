"""Whether torch.compile pays: steps ahead times the seconds that each saves, against what the compiler takes here.

What was measured of a network lies beside the compiler's own cache, so that both are lost together.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from ..core.algorithm import Algorithm, Stage
from ..core.batches import Federation, OnHost
from ..core.cohort import Everyone
from ..core.files import write_atomic
from ..core.network import Network
from ..core.run import run
from .lanes import Lanes

# On an H200 compiling saved 0.12 to 0.27 of a step, and took 15 to 22 s, or 4.5 s where its cache had the network
# (results/speed.md). These hold until this machine has numbers of its own.
_SHARE, _COLD, _WARM = 0.2, 20.0, 5.0
_MOST = 2e-3  # seconds of a step that compiling can be hoped to save: with too few steps nothing is measured
_LANES, _STEPS, _ROUNDS = 8, 16, 3

Measure = Callable[[bool], tuple[float, float]]  # compiled? -> seconds of a step, seconds until the first round


@dataclass(frozen=True)
class Measured:
    """Of one network on one device: seconds of a step in lanes, and what compiling takes; 0: not known."""

    plain: float = 0.0
    compiled: float = 0.0
    cold: float = 0.0
    warm: float = 0.0  # where the compiler's cache has it


def decide(file: Path, steps: float, measure: Measure) -> tuple[bool, str]:
    """Whether compiling pays for so many steps, and a sentence that says why. Measures what nobody has measured."""
    known = read(file)
    cost = (known.warm or _WARM) if known.cold else _usual(file.parent)
    if steps * _MOST > cost and not known.plain:
        known = _write(file, replace(known, plain=measure(False)[0]))
    saved = steps * (known.plain - known.compiled if known.compiled else _SHARE * known.plain)
    if saved > cost and not known.compiled:
        compiled, first = measure(True)
        _here.add(file)
        known = _write(file, replace(noted(known, first), compiled=compiled))
        saved, cost = steps * (known.plain - compiled), 0.0  # this process has it now
    pays = saved > cost
    gain = f"{steps:,.0f} steps save about {max(saved, 0):.1f} s" if known.plain else f"{steps:,.0f} steps are few"
    takes = f"compiling takes {cost:.0f} s" if cost else "the compiler has done its work"
    return pays, f"compile is {'on' if pays else 'off'}: {gain}, {takes}"


def noted(known: Measured, seconds: float) -> Measured:
    """With what compiling took just now: longer when the compiler's cache was empty."""
    return replace(known, warm=seconds) if known.cold else replace(known, cold=seconds)


_here: set[Path] = set()  # networks that this process has compiled: again they take no time


def note(file: Path, seconds: float) -> None:
    """Remember what compiling took in a run, when it was the first of this process with this network."""
    if file not in _here:
        _here.add(file)
        _write(file, noted(read(file), seconds))


def read(file: Path) -> Measured:
    with suppress(OSError, ValueError, TypeError):
        return Measured(**json.loads(file.read_bytes()))
    return Measured()


def _write(file: Path, known: Measured) -> Measured:
    with suppress(OSError):  # a disk that is full costs another measurement, not the run
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps(asdict(known)).encode())
    return known


def _usual(folder: Path) -> float:
    """Seconds that networks took to compile on this machine."""
    found = [read(file).cold for file in sorted(folder.glob("*.json"))]
    found = [cold for cold in found if cold]
    return sum(found) / len(found) if found else _COLD


def store(net: Network, federation: Federation, size: int, device: str) -> Path:
    """The file about this network, these shapes, this device and this torch, in the compiler's cache."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    shape = [size, *_examples(federation, 1)[0].shape[1:]]
    what = [torch.__version__, name, net.precision, net.buffers, shape, type(net.module).__qualname__, str(net.module)]
    return Path(cache_dir()) / "fedlens" / f"{hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]}.json"


def measured(net: Network, federation: Federation, plan: Stage, device: str, compiled: bool) -> tuple[float, float]:
    """Seconds of a step of FedAvg in lanes on a few of these images, and until the first round was done."""
    size, began, laps = plan.size, time.perf_counter(), []
    x, y = (part.to(device) for part in _examples(federation, _LANES * size))
    data = replace(federation.data, x=x, y=y)
    owned = {i: torch.arange(i * size, (i + 1) * size, device=device) for i in range(_LANES)}
    none = dict.fromkeys(owned, torch.empty(0, dtype=torch.long, device=device))
    net = net.copy().to(device)
    net.compile = compiled
    engine = Lanes(net, Federation(data, owned, none), lanes=_LANES)
    usual = dict(algorithm=None, cohort=Everyone(), steps=_STEPS, epochs=1, uplink=(), defences=())
    plan = replace(plan, rounds=1 + _ROUNDS, **usual)

    def lap(*_: object) -> None:
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        laps.append(time.perf_counter())

    try:
        run(Algorithm(), net, engine, plan, observe=lap)
    finally:
        engine.close()
    fastest = min(after - before for before, after in pairwise(laps))
    return fastest / (_LANES * _STEPS), laps[0] - began


def _examples(federation: Federation, count: int) -> tuple[Tensor, Tensor]:
    """So many of the clients' examples, some several times where there are fewer; and their labels."""
    data = federation.data
    index = torch.cat([own[:count].cpu() for own in federation.train.values() if len(own)][:count])
    index = index[torch.arange(count) % len(index)]
    index = index if isinstance(data.x, OnHost) else index.to(data.x.device)
    return data.x[index], data.y[index]
