"""An audit of a run: who knows what, which attacks apply, and what they find."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.batches import Federation, Shard
from ..core.errors import BadInput, nearest
from ..core.files import write_atomic
from ..core.network import Network
from ..core.rng import generator, key
from ..core.tree import Tree
from ..data import Images as Loaded
from ..experiment import check_device
from ..runs.checkpoints import lost
from ..runs.folder import RunFolder
from ..runs.opened import OpenedRun
from ..runs.places import check_origin, opened
from ..runs.transcript import Transcript
from .attack import LEGEND, Answers, Inapplicable, Knowledge, LabelledImages, Prior, PrivacyAttack, Verdict
from .figures import overview, side_by_side
from .gradients import GradientInversion, LabelLeakage
from .inversion import FeatureInversion
from .measures import check_rate
from .membership import LikelihoodRatio, LossAttack, SharedMembership

ATTACKS: dict[str, PrivacyAttack] = {
    "loss": LossAttack("global"),
    "loss_uploads": LossAttack("uploads"),
    "loss_personal": LossAttack("personal"),
    "lira": LikelihoodRatio("global"),
    "lira_personal": LikelihoodRatio("personal"),
    "shared_members": SharedMembership(),
    "shared_images": FeatureInversion(),
    "gradients": GradientInversion("cosine"),
    "dlg": GradientInversion("dlg"),
    "idlg": GradientInversion("idlg"),
    "labels": LabelLeakage(),
}
# Personal models never cross: who asks them has more than the server. dlg is idlg without the labels.
USUAL = tuple(name for name in ATTACKS if name != "dlg" and not name.endswith("personal"))
_RATES = (0.01, 0.001)
_CLIENTS = 5  # whose candidates are asked about


@dataclass(frozen=True)
class Audit:
    run: str
    rounds: int  # recorded
    verdicts: list[Verdict]
    skipped: dict[str, str]  # attack -> why it finds nothing to work on
    seconds: float
    lost: str = ""  # what damage has taken of the record, in words

    def plain(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "rounds": self.rounds,
            "verdict": self.verdict(),
            "verdicts": [verdict.plain() for verdict in self.verdicts],
            "skipped": self.skipped,
            "seconds": round(self.seconds, 1),
        }

    def verdict(self) -> str:
        """Which attacks learn more than by chance, in one or two sentences."""
        above = [verdict.attack for verdict in self.verdicts if verdict.is_above_chance]
        rest = [verdict.attack for verdict in self.verdicts if not verdict.is_above_chance]
        gone = f" Damage has taken {self.lost}: only what was sent before is attacked." if self.lost else ""
        if not above:
            return f"No attack of {len(rest)} finds more than chance: {', '.join(rest)}.{gone}"
        beside = f" At chance: {', '.join(rest)}." if rest else ""
        count = f"{len(above)} of {len(self.verdicts)} attacks find more than chance"
        return f"This run leaks: {count} ({', '.join(above)}).{beside}{gone}"

    def markdown(self) -> str:
        lines = [
            f"# Audit of {self.run}: {self.rounds} recorded round{'s' * (self.rounds != 1)}",
            "",
            self.verdict(),
            "",
            f"| attack | measure | {' | '.join(LEGEND)} | samples x seeds |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for verdict in self.verdicts:
            for measure in verdict.found:
                size = f"{verdict.samples} x {verdict.seeds}"
                cells = [verdict.attack, measure, *map(str, verdict.beside(measure)), size]
                lines.append(f"| {' | '.join(cells)} |")
        lines += ["", *(f"- {name}: {meaning}." for name, meaning in LEGEND.items())]
        lines += ["", *(f"- **{v.attack}** ({v.threat}). {v.sentence}{_added(v)}" for v in self.verdicts)]
        lines += [f"- {name}: not tried, since {why}." for name, why in self.skipped.items()]
        return "\n".join(lines) + "\n"


def _added(verdict: Verdict) -> str:
    return f" {'; '.join(verdict.notes).capitalize()}." if verdict.notes else ""


def audit(
    path: str | Path,
    attacks: Sequence[str] = (),
    *,
    fprs: Sequence[float] = (),
    candidates: int = 500,
    seeds: int = 2,
    device: str = "cpu",
    say: Callable[[str], None] = lambda text: None,
) -> Audit:
    """Attack a run by these, or by all that find something; its folder gets audit.json, audit.md and pictures."""
    for name in attacks:
        if name not in ATTACKS:
            raise BadInput(f"--attacks {name!r} is unknown; {nearest(name, ATTACKS)}")
    began = time.perf_counter()
    folder = RunFolder.open(path)
    transcript, knowledge = prepared(folder, fprs, candidates, seeds, device)
    skipped = _without_work(list(attacks) or list(USUAL), transcript, knowledge)
    if attacks and skipped:
        raise BadInput(f"--attacks {_listed(skipped, path)}; nothing was run")
    chosen, verdicts = [name for name in attacks or USUAL if name not in skipped], []
    if not chosen:
        reasons = "; ".join(dict.fromkeys(skipped.values()))
        raise BadInput(
            f"{path} sends nothing that can be attacked ({reasons}); --attacks loss_personal asks personal models"
        )
    for number, name in enumerate(chosen, 1):
        started = time.perf_counter()
        verdicts.append(verdict := ATTACKS[name].run(transcript, knowledge, name))
        say(f"{number}/{len(chosen)} {name}: {verdict.sentence} ({time.perf_counter() - started:.1f} s)")
    found = Audit(str(folder.path), len(transcript), verdicts, skipped, time.perf_counter() - began, transcript.damage)
    folder.write_json("audit.json", found.plain())
    write_atomic(folder.path / "audit.md", found.markdown().encode())
    draw(found, folder.figures)
    return found


def _without_work(names: Sequence[str], transcript: Transcript, knowledge: Knowledge) -> dict[str, str]:
    """Attack -> why it finds nothing to work on; all of them are asked before any runs."""
    found = {}
    for name in names:
        try:
            ATTACKS[name].check(transcript, knowledge)
        except Inapplicable as reason:
            found[name] = str(reason)
    return found


def _listed(skipped: Mapping[str, str], path: str | Path) -> str:
    first, *rest = [f"{name} finds nothing to attack in {path}: {why}" for name, why in skipped.items()]
    return "; ".join([first, *(words.replace(f" in {path}", "") for words in rest)])


def draw(found: Audit, place: Path) -> list[Path]:
    drawn = [overview(found.verdicts, place / "audit")]
    for verdict in found.verdicts:
        if verdict.gallery is not None:
            drawn.append(side_by_side(verdict.gallery, place / f"audit-{verdict.attack}", verdict.sentence))
    return drawn


# ---- who knows what -------------------------------------------------------------------------------------------------
def prepared(
    folder: RunFolder, fprs: Sequence[float], candidates: int, seeds: int, device: str
) -> tuple[Transcript, Knowledge]:
    """The transcript, what its adversary knows besides, and the truth."""
    check_device(device)
    experiment = opened(folder)
    precision = "fp64" if experiment.execution.precision == "fp64" else "fp32"
    experiment = experiment.with_execution(device=device, precision=precision, compile=False)
    stages = [stage for stage, _, _ in experiment.timetable()]
    loaded = experiment.images()
    net, (federation, split) = experiment.network(loaded).to(device), experiment.federation(loaded)
    check_origin(folder, experiment, loaded, split=split.hash)
    federation = federation.to(device)
    run = OpenedRun(folder, experiment, loaded, net, federation)
    checkpoint = run.newest()
    state = checkpoint.state.map(lambda leaf: leaf.to(device))
    whole = len(checkpoint.transcript) if checkpoint.transcript or checkpoint.damaged else None
    place = folder.path / "transcript"
    gone = {**lost(folder.path), **checkpoint.lost}.get(place.name, "")
    transcript = Transcript(place, stages[: checkpoint.round], state, device, whole, gone)
    prior, members = asked_about(transcript, net, federation, loaded, candidates)
    prior = replace(prior, personal=_personal(run, list(prior.candidates)))
    answers = Answers(federation, stages, experiment.seed, members)
    return transcript, Knowledge(prior, answers, _rates(fprs, members), seeds)


def asked_about(
    transcript: Transcript, net: Network, federation: Federation, loaded: Loaded, candidates: int
) -> tuple[Prior, dict[int, Tensor]]:
    """Candidates of some clients that took part, half of them trained on; of either half as many are of each class, so
    that no attack gets by on knowing what a client has. Test images that are no candidates are auxiliary."""
    took_part = list(dict.fromkeys(client for crossing in transcript for client in crossing.replies))[:_CLIENTS]
    pool = federation.pool[_order(len(federation.pool), "pool").to(federation.pool.device)]
    outsiders, auxiliary = pool[: len(pool) // 2], pool[len(pool) // 2 :]
    y, found, members = federation.data.y, {}, {}
    free = torch.ones(len(outsiders), dtype=torch.bool, device=pool.device)
    for client in sorted(took_part):
        mine = federation.train[client]
        mine = mine[_order(len(mine), "members", client).to(mine.device)]
        inside, outside = [], []
        for label in y[mine].unique().tolist():
            others = (free & (y[outsiders] == label)).nonzero()[:, 0]
            own = mine[y[mine] == label]
            count = min(len(others), len(own), -(-candidates // len(took_part) * len(own) // len(mine)))
            inside.append(own[:count])
            outside.append(outsiders[others[:count]])
            free[others[:count]] = False
        index = torch.cat([*inside, *outside])
        half = sum(map(len, inside))
        if not half:
            continue
        shuffled = _order(len(index), "candidates", client).to(index.device)
        shard = Shard(federation.data, index[shuffled])
        found[client] = LabelledImages(shard.x, shard.y)
        members[client] = shuffled < half
    if not found or not len(auxiliary):
        raise BadInput("an audit needs test images that nobody trained on, of the classes that clients have")
    others = Shard(federation.data, auxiliary)
    return Prior(net, found, LabelledImages(others.x, others.y), loaded.mean, loaded.std), members


def _order(count: int, *purpose: object) -> Tensor:
    return torch.randperm(count, generator=generator(key("audit", *purpose)))


def _personal(run: OpenedRun, clients: list[int]) -> dict[int, Tree]:
    """Models that clients predict with, where they differ from client to client."""
    models = run.client_models(run.newest(), clients)
    own = {client: model.map(lambda leaf: leaf.to(run.experiment.execution.device)) for client, model in models}
    first, *rest = own.values()
    alike = all(torch.equal(a, b) for other in rest for a, b in zip(first.leaves(), other.leaves(first), strict=True))
    return {} if rest and alike else own


def _rates(fprs: Sequence[float], members: dict[int, Tensor]) -> tuple[float, ...]:
    """Those asked for, or those that so many images can resolve."""
    others = sum(int((~member).sum()) for member in members.values())
    for fpr in fprs:
        check_rate(fpr, others)
    return tuple(fprs) or tuple(fpr for fpr in _RATES if fpr * others >= 1)
