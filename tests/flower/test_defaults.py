"""What a deployment adds, and what one hostile node can do against it; declared classes; first weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fedlens.cli.format as words_of_commands
from fedlens import config
from fedlens.core.check import Check
from fedlens.core.dry_run import Rehearsal
from fedlens.core.engine import Reply
from fedlens.core.errors import BadInput
from fedlens.core.run import run as run_rounds
from fedlens.core.tree import Tree
from fedlens.data.classes import OtherClasses, declared
from fedlens.engines.sequential import Sequential
from fedlens.flower import launch
from fedlens.flower.client import Trainer
from fedlens.flower.contract import contract, order_of
from fedlens.flower.defaults import added
from fedlens.flower.messages import Payload, leaves_of, tree_of
from fedlens.flower.node import Node, Policy
from fedlens.flower.own_model import own_model
from fedlens.runs.folder import config_hash
from test_trust import bars, words

FIVE = ("clients=5", "cohort=5", "rounds=1", "evaluate.personal=none")


# ---- what is added ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("more", "expected", "sentence"),
    [
        (("clients=3", "cohort=3"), ["policy.max_weight_share=0.6667", "defences=clip"], ""),
        (("clients=40", "cohort=20"), ["policy.max_weight_share=0.2", "defences=clip"], ""),
        (("clients=2", "cohort=2"), [], "a round has 2 clients"),
        (("clients=3", "cohort=3", "defences=none"), ["policy.max_weight_share=0.6667"], "not clipped, as you say"),
        (("clients=3", "cohort=3", "policy.max_weight_share=none"), ["defences=clip"], "weight, as you say"),
        (("clients=3", "cohort=3", "policy.claim=0.5", "defences=median"), [], ""),
        (("clients=3", "cohort=3", "algorithm=fedgen"), ["policy.max_weight_share=0.6667"], "also uploads"),
    ],
)
@pytest.mark.filterwarnings("ignore:policy.claim is now called")
def test_what_a_deployment_adds_and_says(more, expected, sentence, tmp_path):
    found, said = added(words(bars(tmp_path / "bars.npz"), *more))
    assert found == expected and (sentence in " ".join(said) if sentence else not said)
    config.read(None, [*words(tmp_path / "bars.npz", *more), *found])  # words that can be typed


def test_a_federation_is_simulated_by_its_folder(tmp_path):
    """`fedlens run federation` reads what init has written, with all that it has added and without its run's folder."""
    asked = words(bars(tmp_path / "bars.npz"), "clients=3", "cohort=3")
    more, _ = launch.init(tmp_path / "federation", asked, "127.0.0.1", 9092)
    file, read = words_of_commands.split_words([str(tmp_path / "federation"), "rounds=1"])
    assert file is None and read == [*asked, *more, "rounds=1"]
    assert config_hash(config.read(None, read[:-1])) == config_hash(launch.experiment_of(tmp_path / "federation"))


# ---- one hostile node of five ----------------------------------------------------------------------------------------
def moved(folder: Path, lie: Tree | None, *more: str, times: float = 1.0) -> float:
    """How far one round moves the model from where honest clients would, one of five lying, in honest distances."""
    experiment = config.read(None, words(bars(folder / "bars.npz"), *FIVE, *more)).resolved()
    images = experiment.images()
    net, (federation, _) = experiment.network(images), experiment.federation(images)

    class Hostile(Sequential):
        def run(self, job, cohort):
            found = super().run(job, cohort)
            last = found[-1].upload
            forged = last.replace(delta=last.delta * times, **(lie or {}))
            return [*found[:-1], Reply(found[-1].client, forged)]

    check = Check(Rehearsal(Sequential, net, federation.data), experiment.policy.max_reply_mib)
    where = []
    for engine in (Sequential(net, federation), Hostile(net, federation)):
        ended = run_rounds(experiment.algorithm, net, engine, experiment.plan, policy=experiment.policy, check=check)
        where.append(torch.cat([leaf.flatten().double() for _, leaf in sorted(ended.state.model.params.paths())]))
    begun = torch.cat([leaf.flatten().double() for _, leaf in sorted(net.initial_weights().params.paths())])
    return float((where[1] - where[0]).norm() / (where[0] - begun).norm())


def test_one_node_of_five_is_bounded_by_the_defaults(tmp_path):
    """Before: a claim of 1e12 images is the whole round, an update of a million times its length moves the model so."""
    more, _ = added(words(bars(tmp_path / "bars.npz"), *FIVE))
    assert more == ["policy.max_weight_share=0.4", "defences=clip"]
    claim = Tree(weight=torch.tensor(1e12, dtype=torch.float64))
    assert moved(tmp_path, claim, times=-1.0) > 1.2 and moved(tmp_path, None, times=1e6) > 1e4
    for lie, times in ((claim, -1.0), (None, 1e6), (claim, 1e6)):
        assert moved(tmp_path, lie, *more, times=times) < 1.2  # 0.4 of the weight, no longer than the median


# ---- classes ---------------------------------------------------------------------------------------------------------
def test_classes_are_those_of_the_run(tmp_path):
    """Numbered as they are declared; the data may lack some; others are refused by name. The same in a simulation."""
    asked = words(bars(tmp_path / "bars.npz", names=("a", "b", "c")))
    plain = config.read(None, asked)
    images = config.read(None, [*asked, "classes=d,c,b,a"]).images()
    assert images.classes == ("d", "c", "b", "a")
    before = plain.images()
    assert [images.classes[y] for y in images.y.tolist()] == [before.classes[y] for y in before.y.tolist()]
    with pytest.raises(OtherClasses, match="classes= does not declare c, of which the data has images"):
        config.read(None, [*asked, "classes=a,b"]).images()
    for wrong in ("classes=a", "classes=a,a,b,c"):
        with pytest.raises(BadInput, match="two or more different names"):
            config.read(None, [*asked, wrong]).images()
    assert config.read(None, [*asked, "classes=0,1"]).classes == ("0", "1")
    assert config_hash(plain) == config_hash(replace(plain, classes=())) != config_hash(replace(plain, classes=("a",)))
    told = contract(config.read(None, [*asked, "classes=d,c,b,a"]), images, "run")
    assert told["data"]["classes"] == ["d", "c", "b", "a"] and "classes" not in told["experiment"]
    assert declared(images, images.classes) is images


def test_a_site_that_lacks_a_class_trains_and_improves(tmp_path):
    """Two of three classes at the site: it learns them, and rows of the third have no example of its own."""
    server = config.read(None, words(bars(tmp_path / "bars.npz", names=("a", "b", "c")), "local.steps=20", "rounds=1"))
    bars(tmp_path / "site.npz", classes=2, seed=1, names=("a", "b"))
    images = server.images()
    net = server.network(images)
    data = config.read(None, [f"data={tmp_path / 'site.npz'}"]).data
    trainer = Trainer(Node(0, data=data, storage=str(tmp_path / "a"), policy=Policy(contracts="any")), say=print)
    first = net.initial_weights()
    (job,) = _jobs(server, net, images)
    notes = {"ask": "work", "contract": contract(server, images, "run")}
    notes["order"] = order_of(server.timetable(), job)
    answer, _ = trainer.answer(Payload(notes, {"download": leaves_of(job.download)}))
    delta = tree_of(answer.trees["upload"]).delta
    own = data.load()
    x = (own.x[own.test].float() / 255 - torch.tensor(images.mean)) / torch.tensor(images.std)
    y = own.y[own.test]

    def loss(weights: Tree) -> float:
        return float(torch.nn.functional.cross_entropy(net(weights, x), y))

    assert loss(first.replace(params=first.params + delta.params)) < 0.7 * loss(first)


def _jobs(experiment, net, images):
    jobs = []

    class Watch(Sequential):
        def run(self, job, cohort):
            jobs.append(job)
            return super().run(job, cohort)

    run_rounds(experiment.algorithm, net, Watch(net, experiment.federation(images)[0]), experiment.plan)
    return jobs


# ---- first weights ---------------------------------------------------------------------------------------------------
def test_first_weights_travel_once_and_private_parts_start_from_them(tmp_path):
    """FedPer's head never comes from the server: with model.weights= it must start as it does in a simulation."""
    asked = words(bars(tmp_path / "bars.npz"), "model.predictor=linear", "algorithm=fedper", "local.batch_size=2")
    asked += ["local.steps=1"]
    blank = config.read(None, [word for word in asked])
    images = blank.images()
    module = config.read(None, [*asked, "seed=7"]).network(images).module
    save_file({k: v.contiguous() for k, v in module.state_dict().items()}, tmp_path / "first.safetensors")
    experiment = config.read(None, [*asked, f"model.weights={tmp_path / 'first.safetensors'}"]).resolved()
    net = experiment.network(images)
    assert not torch.equal(
        net.initial_weights().params["head.weight"], blank.network(images).initial_weights().params["head.weight"]
    )
    agreed = contract(experiment, images, "run", net.initial_weights())
    assert agreed["initial"] and str(tmp_path) not in json.dumps(agreed["experiment"])
    trial = Policy(contracts="any")
    trainers = [
        Trainer(Node(i, simulation=experiment.data, storage=str(tmp_path / f"n{i}"), policy=trial), say=print)
        for i in range(2)
    ]
    engine, asked_for = _Wire(experiment, agreed, trainers, net), []
    expected = run_rounds(experiment.algorithm, net, Sequential(net, experiment.federation(images)[0]), experiment.plan)
    found = run_rounds(experiment.algorithm, net, engine, experiment.plan)
    one, other = dict(expected.state.paths()), dict(found.state.paths())
    assert one.keys() == other.keys() and all(torch.equal(leaf, other[path]) for path, leaf in one.items())
    assert engine.missing == [0, 1] and not asked_for  # each asked for them once, in its first order
    mine = own_model(trainers[0].node).net.initial_weights().params  # as `fedlens deploy export` makes it again
    assert torch.equal(mine["head.weight"], net.initial_weights().params["head.weight"])


class _Wire:
    """Orders to trainers without Flower; whoever misses a common payload gets it."""

    def __init__(self, experiment, agreed, trainers, net):
        self.population, self.trainers, self.agreed = experiment.clients, trainers, agreed
        self.timetable, self.first, self.missing = experiment.timetable(), net.initial_weights(), []

    def run(self, job, cohort):
        notes = {"ask": "work", "contract": self.agreed, "order": order_of(self.timetable, job)}
        replies = []
        for client in cohort:
            trees = {"download": leaves_of(job.download)}
            answer, _ = self.trainers[client].answer(Payload(notes, trees))
            if "missing" in answer.notes:
                self.missing.append(client)
                answer, _ = self.trainers[client].answer(Payload(notes, {**trees, "initial": leaves_of(self.first)}))
            replies.append(Reply(client, tree_of(answer.trees["upload"])))
        return replies
