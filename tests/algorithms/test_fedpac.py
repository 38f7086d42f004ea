"""FedPAC against a plain loop over all clients, the best mix by trying every support, and by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F

from fedlens import config
from fedlens.algorithms import FedPAC, FedRep
from fedlens.algorithms import fedpac as module
from fedlens.algorithms._heads import best_mix, best_shares
from fedlens.core.algorithm import Client
from fedlens.core.batches import identity
from fedlens.core.errors import BadInput
from fedlens.core.objective import cross_entropy
from fedlens.core.optimizer import Sgd
from fedlens.core.rng import generator
from fedlens.core.tree import Tree
from personal import Values, by_package, gap, is_head, label, loaded, mean, sgd, weights
from small import federation, network
from textbook import TOLERANCE, TWO_OF_THREE, World

CLASSES = 3
WORLDS = {
    "everyone": World(),
    "two of three": World(TWO_OF_THREE, sizes=(13, 2, 9)),  # whoever has two images lacks a class
    "plain": World(norm=False, momentum=0.0),
}


def every_support(form: torch.Tensor) -> torch.Tensor:
    """The best of the answers that Lagrange gives for each set of shares which may be more than zero."""
    best, least = None, float("inf")
    for size in range(1, len(form) + 1):
        for some in map(list, combinations(range(len(form)), size)):
            part = torch.linalg.inv(form[some][:, some]).sum(1)
            part = part / part.sum()
            value = float(part @ form[some][:, some] @ part)
            if bool((part >= 0).all()) and value < least:
                best, least = torch.zeros(len(form)).double(), value
                best[some] = part
    assert best is not None
    return best


def seen_by(world: World, values: Values, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and labels of a client's images, as the model would predict."""
    data, mine = federation(world.sizes, identity).data, federation(world.sizes, identity).train[k]
    with torch.no_grad():
        return loaded(world, values).eval().features(data.x[mine]), data.y[mine]


def statistics(z: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, float, dict[int, torch.Tensor]]:
    """h, v and the class means, class by class as the paper writes them."""
    h, v, means = torch.zeros(CLASSES, z.shape[1]).double(), 0.0, {}
    for c in sorted(set(y.tolist())):
        share, means[c] = float((y == c).double().mean()), z[y == c].mean(0)
        h[c] = share * means[c]
        v += share * float((z[y == c] ** 2).sum(1).mean()) - share**2 * float(means[c] @ means[c])
    return h, v / len(y), means


def head_of(k: int, own: Values, mine: tuple, last: dict) -> Values:
    """The mix of the last round's heads for client k, whose own is not counted twice."""
    h_k, v_k = last[k][1:] if k in last else mine[:2]
    entries = {k: (own, h_k, v_k)} | {j: row for j, row in last.items() if j != k}
    rows = list(entries.values())
    apart = [h_k - h for _, h, _ in rows]
    form = torch.tensor([[float((a * b).sum()) for a in apart] for b in apart], dtype=torch.float64)
    form += torch.diag(torch.tensor([v for *_, v in rows], dtype=torch.float64))
    alpha = every_support(form)
    alpha[alpha < 1e-3] = 0
    alpha /= alpha.sum()
    return {n: sum(a * row[0][n] for a, row in zip(alpha, rows, strict=True)) for n in own}


def trained(world: World, model, round: int, k: int, pull: float, goals: dict[int, torch.Tensor] | None) -> Values:
    """One epoch of the head, then all of the world's of the body, towards the goals."""
    batches = world.batches(round, k, world.epochs + 1)
    turn = len(batches) // (world.epochs + 1)
    body = [p for n, p in model.named_parameters() if not is_head(n)]
    for part, rows, aligned in ((model.head.parameters(), batches[:turn], False), (body, batches[turn:], True)):
        model.train(aligned)
        descent = sgd(world, world.rate(round), part)
        for x, y, weight in rows:
            model.zero_grad()
            z = model.features(x)
            value = F.cross_entropy(model.head(z), y, reduction="none")
            if aligned and goals is not None:
                value = value + pull * ((z - torch.stack([goals[c] for c in y.tolist()])) ** 2).mean(1)
            ((value * weight).sum() / weight.sum()).backward()
            descent.step()
    return weights(model)


def fedpac(world: World, pull: float) -> Values:
    first = weights(world.model())
    shared, heads, last, protos = {n: v for n, v in first.items() if not is_head(n)}, {}, {}, {}
    for round, cohort in enumerate(world.cohorts):
        local, rows, sums = {}, {}, {}
        for k in cohort:
            own = heads.get(k, {n: v for n, v in first.items() if is_head(n)})
            found = statistics(*seen_by(world, shared | own, k))
            start = head_of(k, own, found, last) if last else own
            goals = found[2] | protos if protos else None
            local[k] = trained(world, loaded(world, shared | start), round, k, pull, goals)
            heads[k] = {n: v for n, v in local[k].items() if is_head(n)}
            rows[k] = heads[k], *found[:2]
            z, y = seen_by(world, local[k], k)
            for c in set(y.tolist()):
                sums.setdefault(c, []).append(z[y == c])
        protos |= {c: torch.cat(z).mean(0) for c, z in sums.items()}
        shared, last = mean({k: {n: local[k][n] for n in shared} for k in cohort}, world.shares(cohort)), rows
    nothing = torch.zeros(64).double()
    found = label("model", shared) | {
        "prototypes": torch.stack([protos.get(c, nothing) for c in range(CLASSES)]),
        "means": torch.stack([h for _, h, _ in last.values()]),
        "variance": torch.tensor([v for *_, v in last.values()], dtype=torch.float64),
    }
    for k, values in heads.items():
        found |= label(f"private of {k}", values)
    return found


def known(found) -> Values:
    mine = {n: v for n, v in found.values.items() if n.startswith(("private", "model", "prototypes"))}
    return mine | {name: found.server.state.rows[name] for name in ("means", "variance")}


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_fedpac(world):
    found = known(by_package(world, FedPAC(pull=0.7)))
    assert len(found) > 8 and gap(found, fedpac(world, 0.7)) <= TOLERANCE


def test_without_mix_and_pull_it_is_fedrep():
    world = WORLDS["everyone"]
    found = by_package(world, FedPAC(pull=0.0, mix=False)).values
    usual = by_package(world, FedRep(head_epochs=1, body_epochs=2)).values
    assert len(usual) > 8 and all(torch.equal(found[name], usual[name]) for name in usual)


def test_one_client_mixes_with_nobody():
    world = World(((0,), (0,), (0,)))
    found, usual = (by_package(world, FedPAC(mix=mix)).values for mix in (True, False))
    assert all(torch.equal(found[name], usual[name]) for name in usual)


def mixed(own: float, heads: list[float], means: list[float], variance: list[float], ticket: int = 1) -> float:
    """Of a client whose row is the first, or of another one (ticket 0) that found the first row's numbers itself."""
    rows = Tree(head=Tree({"head.w": torch.tensor(heads, dtype=torch.float64)}), ticket=torch.arange(len(heads)) + 1)
    rows = rows.replace(
        means=torch.tensor(means, dtype=torch.float64)[:, None, None],
        variance=torch.tensor(variance, dtype=torch.float64),
    )
    memory = Tree(
        private=Tree(params=Tree({"head.w": torch.tensor(own, dtype=torch.float64)})), ticket=torch.tensor(ticket)
    )
    client = Client(network(), Tree(rows=rows), memory, Tree(), cross_entropy, Sgd())
    found = Tree(means=rows.means[0], variance=rows.variance[0])
    return float(best_mix(client, found)["head.w"])


def test_by_hand():
    """v = (0.2, 0.3), |h1 - h2|² = 0.5: the own head has (v2 + 0.5) / (v1 + v2 + 0.5) = 0.8 of it."""
    assert mixed(1.0, [1.0, 0.0], [0.0, 0.5**0.5], [0.2, 0.3]) == pytest.approx(0.8, abs=1e-15)
    # Where all see the same features, heads count by 1 / v; and a head whose share is below a thousandth not at all.
    assert mixed(1.0, [1.0, 0.0], [2.0, 2.0], [0.2, 0.3]) == pytest.approx(0.6, abs=1e-15)
    assert mixed(1.0, [1.0, 0.0], [0.0, 30.0], [0.2, 0.3]) == 1.0
    # One that was not among them has the first row's numbers beside the first row: v = (0.2, 0.2) and the other.
    assert mixed(1.0, [0.0, 0.0], [2.0, 2.0], [0.2, 0.2], ticket=9) == pytest.approx(1 / 3, abs=1e-15)


@pytest.mark.parametrize("seed", range(12))
def test_the_best_shares(seed):
    draw = generator(seed)
    apart = torch.randn(5, 3, generator=draw, dtype=torch.float64)
    form = (apart - apart[0]) @ (apart - apart[0]).T + torch.rand(5, generator=draw, dtype=torch.float64).diag()
    found = best_shares(form)
    assert float((found - every_support(form)).abs().max()) < 1e-13
    many = torch.rand(60, 8, generator=draw, dtype=torch.float64)
    form = (many - many[0]) @ (many - many[0]).T + (0.01 + torch.rand(60, generator=draw, dtype=torch.float64)).diag()
    found = best_shares(form)
    slope, value = form @ found, found @ form @ found
    assert float(found.sum()) == pytest.approx(1, abs=1e-14) and bool((found >= 0).all()) and bool((found > 0).any())
    assert float((slope - value)[found > 0].abs().max()) < 1e-13 and float((slope - value).min()) > -1e-13


@dataclass(frozen=True)
class OwnTwice(FedPAC):
    """Does not know its own row, from which it counts one more."""

    def start(self, client, found=None):
        return super().start(replace(client, memory=client.memory.replace(ticket=torch.tensor(-1))), found)


@dataclass(frozen=True)
class MeasuredAfter(FedPAC):
    """Statistics of the trained body in place of the received one."""

    def finish(self, client, local):
        return super().finish(client, local.replace(found=module.measured(client, local)))


@dataclass(frozen=True)
class SomeoneElses(FedPAC):
    """As one public code: statistics and heads come in different orders."""

    def aggregate(self, server, uploads):
        state = super().aggregate(server, uploads)
        return state.replace(rows=state.rows.replace(head=state.rows.head.map(lambda leaf: leaf.flip(0))))


def test_the_textbook_notices():
    right = fedpac(WORLDS["everyone"], 0.7)
    for wrong in (OwnTwice(pull=0.7), MeasuredAfter(pull=0.7), SomeoneElses(pull=0.7)):
        assert gap(known(by_package(WORLDS["everyone"], wrong)), right) > 1e-4, type(wrong).__name__


def test_refused_and_told():
    with pytest.raises(BadInput, match=r"fedpac trains the head and then the body, .* leave local\.steps"):
        list(FedPAC().stages(World(steps=3).stage()))
    told = config.read(None, ["algorithm=fedpac", "uplink=dp"])
    said = "every client's head and class means reach all clients of the next round, unprotected"
    assert told.discloses == {"FedPAC": said}
    assert any(
        note.endswith(said) and note.startswith("uplink=dp does not act on this") for note in told._start_notes([9])
    )
