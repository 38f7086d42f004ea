"""Ray actors on two local nodes: the same bits as the sequential engine, also when actors and nodes are killed."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from fedlens.algorithms import FedAvg, FedPer, Local, Scaffold
from fedlens.core.cohort import Everyone
from fedlens.core.errors import BadInput, ClientFailed, RunFailed
from fedlens.core.memories import Memories, versions
from fedlens.core.run import run
from fedlens.core.tree import Tree
from fedlens.engines.ray import Owner, RayActors, pack, unpack
from fedlens.engines.sequential import Sequential
from fedlens.engines.worker import Storage
from fedlens.runs.diff import differences
from recipes import RECIPES, Late
from small import PLAN, SIZES, federation, network, same

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
ray = pytest.importorskip("ray", reason="needs the extra ray: pip install 'fedlens[ray]'")

METHODS = ["fedavg", "scaffold", "fedper", "spatl", "fedxds", "scaffold+ft"]
ALL = replace(PLAN, cohort=Everyone())


def make(memories):
    """What an actor computes with; it says where it is."""
    node = ray.get_runtime_context().get_node_id()
    (memories.folder.parent / f"node-{node}").touch()
    return Sequential(network(), federation(), memories=memories)


@dataclass(frozen=True)
class Kill:
    """When an actor ends itself, and what it takes along; `once` is the file that says it has happened."""

    once: str
    before: bool  # the client's memory is written
    node: bool = False
    head: str = ""  # a node that stays


class Lethal(Sequential):
    def __init__(self, kill, *parts, **named):
        super().__init__(*parts, **named)
        self.kill = kill

    def conclude(self, job, i, *rest):
        if self.kill.before:
            self._maybe(job)
        reply = super().conclude(job, i, *rest)
        self._maybe(job)
        return reply

    def _maybe(self, job):
        here = ray.get_runtime_context().get_node_id()
        if job.round == 1 and here != self.kill.head:
            try:
                Path(self.kill.once).touch(exist_ok=False)
            except FileExistsError:
                return
            if self.kill.node:
                assert Path(f"/proc/{os.getppid()}/comm").read_text().strip() == "raylet"
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def make_lethal(kill, memories):
    return Lethal(kill, network(), federation(), memories=memories)


class Cluster:
    """A head and another node on this machine; room for two sets of actors."""

    def __init__(self):
        from ray.cluster_utils import Cluster

        if "RAY_AUTH_TOKEN" not in os.environ:  # a process stays with the first way in which it proved who it is
            os.environ["RAY_AUTH_MODE"] = "disabled"  # nobody else knows of it
        store = {"num_cpus": 2, "object_store_memory": 80 * 2**20}
        self.nodes = Cluster(initialize_head=True, head_node_args={**store, "include_dashboard": False})
        self.other = self.nodes.add_node(**store)
        self.nodes.wait_for_nodes()
        ray.init(address=self.nodes.address, log_to_driver=False, logging_level="ERROR")
        self.head = self.nodes.head_node.node_id

    def replace_other(self):
        """In place of a node that was killed."""
        self.nodes.remove_node(self.other, allow_graceful=False)
        self.other = self.nodes.add_node(num_cpus=2, object_store_memory=80 * 2**20)
        self.nodes.wait_for_nodes()

    def end(self):
        ray.shutdown()
        self.nodes.shutdown()


@pytest.fixture(scope="module")
def cluster():
    found = Cluster()
    yield found
    found.end()


@pytest.fixture(scope="module")
def actors(cluster, tmp_path_factory):
    """One set of actors for all methods."""
    folder = tmp_path_factory.mktemp("ray")
    two = engine(folder)
    yield two, folder
    two.close()


def engine(folder, making=make):
    return RayActors(making, SIZES, Storage(folder / "clients"), actors=2)


def compare(recipe, two, folder, plan=ALL, begin=0):
    """On two actors and one after another: state, memories and scores must be the same to the bit."""
    one = Sequential(network(), federation())
    expected = run(recipe, network(), one, plan, round=begin)
    found = run(recipe, network(), two, plan, round=begin)
    assert same(expected.state, found.state)
    scores = [each.measure(network().initial_weights()) for each in (one, two)]
    assert len(scores[0]) == 3 and all(same(a, b) for a, b in zip(*scores, strict=True))
    kept = Memories(folder / "clients", round=10**6)
    assert {*one.memories} <= {*kept}
    for client in one.memories:
        assert same(one.memories.get(client), kept.get(client)), f"memory of client {client}"


@pytest.mark.parametrize("name", METHODS)
def test_two_nodes_equal_one_after_another(name, actors):
    two, folder = actors
    begin = 10 * METHODS.index(name)  # what clients knew of the method before is from before these rounds
    compare(Late(RECIPES[name], begin), two, folder, PLAN, begin)
    assert len([*folder.glob("node-*")]) == 2  # both nodes have an actor
    # Without checkpoints in between, a client has the version that counts and none before it.
    clients = [client for client, _ in versions(folder / "clients")]
    assert len(clients) == len({*clients})


@pytest.mark.parametrize("before", [True, False], ids=["before its memory is written", "after"])
@pytest.mark.parametrize("recipe", [Scaffold(), pytest.param(FedPer(), marks=pytest.mark.slow)], ids=str)
def test_an_actor_is_killed_within_a_round(recipe, before, cluster, tmp_path):
    once = tmp_path / "once"
    two = engine(tmp_path, partial(make_lethal, Kill(str(once), before)))
    try:
        compare(recipe, two, tmp_path)
    finally:
        two.close()
    assert once.exists()


def test_what_checkpoints_need_stays(cluster, tmp_path):
    """Killed after a checkpoint and taken up again by other actors: the same as without a break."""
    one = Sequential(network(), federation())
    expected = run(Scaffold(), network(), one, replace(ALL, rounds=5))
    first = engine(tmp_path)
    try:
        states = []

        def observe(server, job, replies):
            states.append(server.state)
            if server.round == 2:
                first.save(2)

        run(Scaffold(), network(), first, replace(ALL, rounds=4), observe=observe)
    finally:
        first.close()
    second = RayActors(make, SIZES, Storage(tmp_path / "clients", round=2), actors=1)
    try:
        found = run(Scaffold(), network(), second, replace(ALL, rounds=5), state=states[1], round=2)
    finally:
        second.close()
    assert same(expected.state, found.state)


class Suicidal(Sequential):
    def conclude(self, *parts):
        os.kill(os.getpid(), signal.SIGKILL)


def make_suicidal(memories):
    return Suicidal(network(), federation(), memories=memories)


@pytest.mark.slow
def test_a_client_that_kills_every_actor_ends_the_run(cluster, tmp_path):
    two = engine(tmp_path, make_suicidal)
    try:
        with pytest.raises(RunFailed, match=r"3 actors were lost over client or piece \d"):
            run(FedAvg(), network(), two, PLAN)
    finally:
        two.close()


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False], ids=["before its memory is written", "after"])
def test_a_node_is_killed_within_a_round(before, cluster, tmp_path):
    once = tmp_path / "once"
    two = engine(tmp_path, partial(make_lethal, Kill(str(once), before, True, cluster.head)))
    try:
        compare(Scaffold(), two, tmp_path)
        assert once.exists()
        assert cluster.other.all_processes["raylet"][0].process.poll() == -signal.SIGKILL
    finally:
        two.close()
        cluster.replace_other()


@dataclass(frozen=True)
class Fails(Local):
    def finish(self, client, local):
        raise ZeroDivisionError("no such thing")


def test_a_failing_client_is_named(actors):
    with pytest.raises(ClientFailed, match=r"client \d failed in round 1: ZeroDivisionError: no such thing"):
        run(Fails(), network(), actors[0], PLAN)


def test_what_cannot_be_is_said(actors, tmp_path, monkeypatch):
    with pytest.raises(BadInput, match=r"workers is 5, but the Ray cluster has 4 CPUs"):
        RayActors(make, SIZES, Storage(tmp_path), actors=5)
    monkeypatch.setattr("fedlens.engines.ray._PATIENCE", 0.2)
    with pytest.raises(RunFailed, match=r"workers is 4, but others hold all but 2 of the Ray cluster's 4 CPUs"):
        RayActors(make, SIZES, Storage(tmp_path), actors=4)
    failure, _ = Owner([]).begin(b"", Storage(tmp_path), ".not-here")
    assert isinstance(failure, BadInput) and "a folder that all machines of the cluster share" in str(failure)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BadInput, match=r"pip install 'fedlens\[ray\]'"):
        RayActors(make, SIZES, Storage(tmp_path))


def test_parcels_keep_every_bit():
    tree = Tree(
        a=Tree({"x.weight": torch.randn(3, 4, 2, 2).to(memory_format=torch.channels_last), "y": torch.tensor(2.5)}),
        half=torch.randn(5).bfloat16(),
        whole=torch.tensor([1, -2, 2**40]),
        yes=torch.tensor([True, False]),
        nothing=torch.empty(0, 3),
        empty=Tree(),
    )
    parcel = pack(tree)
    found = unpack(parcel)
    assert same(tree, found) and found["empty"] == {} and found.nothing.shape == (0, 3)
    parcel.leaves["whole"][2][:] = 0  # what arrived is a copy of its own
    assert found.whole.tolist() == [1, -2, 2**40]


@pytest.mark.slow
def test_the_command_line_on_a_cluster_of_its_own(tmp_path):
    """Killed as a whole and resumed on another engine, too."""
    settings = ["algorithm=scaffold", "clients=8", "cohort=4", "model=mlp", "rounds=6"]

    def fedlens(*words, wait=True):
        command = [sys.executable, "-m", "fedlens", *words]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if wait:
            output, _ = process.communicate(timeout=300)
            assert process.returncode == 0, output
        return process

    fedlens("run", *settings, "engine=sequential", "out=one")
    process = fedlens("run", *settings, "engine=ray", "workers=2", "out=ray", wait=False)
    for _ in range(4):  # the heading, and three rounds
        process.stdout.readline()
    process.kill()
    process.communicate()
    fedlens("resume", "ray")
    assert list(differences(tmp_path / "one", tmp_path / "ray")) == []
    fedlens("run", *settings[:-1], "rounds=3", "engine=ray", "workers=2", "out=other")
    fedlens("resume", "other", "rounds=6", "engine=workers", "workers=2")
    assert not [d for d in differences(tmp_path / "one", tmp_path / "other") if not d.startswith(("metrics", "bytes"))]
