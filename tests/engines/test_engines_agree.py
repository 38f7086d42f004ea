"""Every method gives the same bits in every engine: server state, client memories, what is measured."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fedlens.algorithms import FedAvg, Local, Moon, Scaffold
from fedlens.core.algorithm import Algorithm, Server
from fedlens.core.batches import identity
from fedlens.core.cohort import Everyone
from fedlens.core.engine import Job
from fedlens.core.errors import ClientFailed
from fedlens.core.evaluate import Evaluate
from fedlens.core.memories import Memories, prune
from fedlens.core.run import initial_state, run, timetable
from fedlens.core.tree import Tree
from fedlens.engines.lanes import Lane, Lanes
from fedlens.engines.sequential import Sequential
from fedlens.engines.worker import Storage
from fedlens.engines.workers import Workers
from recipes import CASES, RECIPES, STRUCTURES
from small import PLAN, SIZES, build, federation, network, same
from traces import trace


def reference(recipe, plan):
    engine = Sequential(network(), federation(), checked=True)
    return run(recipe, network(), engine, plan), engine


@pytest.fixture(scope="module")
def pools(tmp_path_factory):
    """Processes for all methods, and what they store. Their clients remember rounds: one that is over starts anew."""
    made = {}

    def pool(workers, begin):
        if workers in made and made[workers][2] >= begin:  # tests are not always run in order
            made.pop(workers)[0].close()
        if workers not in made:
            folder = tmp_path_factory.mktemp("memories")
            made[workers] = Workers(build, SIZES, workers, Storage(folder)), folder, begin
        made[workers] = *made[workers][:2], begin
        return made[workers][:2]

    yield pool
    for engine, *_ in made.values():
        engine.close()


@pytest.mark.parametrize(
    ("name", "workers"), [*((name, 3) for name in CASES), *((name, 1) for name in CASES if name in STRUCTURES)]
)
def test_workers_equal_sequential(name, workers, pools, request):
    if workers == 1:
        request.getfixturevalue("whole_processes")
    expected = trace(name)
    engine, folder = pools(workers, expected.recipe.begin)
    found = expected.again(engine)
    engine.save(0)
    kept = Memories(folder, round=10**6)
    assert same(expected.state, found.state)
    for client, memory in expected.memories.items():
        assert same(memory, kept.get(client)), f"memory of client {client}"
    scores = [one.measure(network().initial_weights()) for one in (Sequential(network(), federation()), engine)]
    assert all(same(a, b) for a, b in zip(*scores, strict=True)) and len(scores[0]) == 3


@pytest.mark.parametrize(
    ("name", "lanes"),
    [*((name, 3) for name in CASES), *((name, lanes) for name in STRUCTURES for lanes in (1, 2, 5))],
)
def test_lanes_equal_sequential(name, lanes, monkeypatch):
    """Eager lanes: the seating of the recorded ones. With two lanes, on two devices that are both this CPU."""
    monkeypatch.setattr("fedlens.engines.lanes._BURST", 4)  # client 4 takes 6 steps a round
    engine = Lanes(network(), federation(), lanes=lanes, devices=["cpu", "cpu"] if lanes == 2 else None)
    expected = trace(name)
    expected.agrees(expected.again(engine).state, engine.memories)


@pytest.mark.parametrize("engine", [Sequential, lambda *built: Lanes(*built, lanes=2)])
def test_a_stage_without_augmentation_sees_images_as_they_are(engine):
    still = run(FedAvg(), network(), engine(network(), federation()), replace(PLAN, augment=False))
    plain = run(FedAvg(), network(), engine(network(), federation(prepare=identity)), PLAN)
    assert same(still.state, plain.state)
    assert not same(still.state, reference(FedAvg(), PLAN)[0].state)


@pytest.mark.parametrize("name", CASES)
def test_rows_that_are_not_full_need_no_filling_without_batchnorm(name, monkeypatch):
    """Steps that look at real examples alone: the same as with rows filled up by examples of weight zero."""
    recipe, plan = CASES[name]
    plan = plan if name in STRUCTURES else replace(plan, rounds=2)  # the second begins with what the first left
    found = run(recipe, network(norm=False), Lanes(network(norm=False), federation(), lanes=3), plan).state
    assert name not in STRUCTURES or same(found, trace(name, norm=False).state)
    seen = []

    def whole(batches, t, net, device):
        seen.append(batches.size(t) < batches.rows.shape[1])
        return batches.rows.shape[1]

    monkeypatch.setattr("fedlens.engines.sequential.looked_at", whole)
    expected = run(recipe, network(norm=False), Sequential(network(norm=False), federation()), plan).state
    for (path, a), (_, b) in zip(expected.paths(), found.paths(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-11, msg=path)
    assert not seen or any(seen)


def test_a_lane_serves_clients_whose_memory_was_on_disk(tmp_path, monkeypatch):
    """What comes back from a file has its names in another order; recording a step again for it would take for ever."""
    made = []
    begin = Lane.__init__

    def count(self, *arguments):
        made.append(self)
        begin(self, *arguments)

    monkeypatch.setattr(Lane, "__init__", count)
    engine = Lanes(network(), federation(), lanes=2, memories=Memories(tmp_path, limit=0))
    found = run(Moon(), network(), engine, replace(PLAN, rounds=6))
    assert len(made) == 2
    expected, _ = reference(Moon(), replace(PLAN, rounds=6))
    assert same(expected.state, found.state)


@dataclass(frozen=True)
class EmptyBranch(Algorithm):
    """Its first broadcast has a branch in which nothing is, as where clients of the last round are sent round."""

    def setup(self, server):
        return super().setup(server).replace(others=Tree())

    def broadcast(self, server):
        return Tree(others=server.state.others, model=server.state.model) if server.round else Tree(others=Tree())

    def start(self, client):
        return client.received.model if "model" in client.received else client.net.initial_weights()

    def finish(self, client, local):
        return Tree(model=self.shared_part(client.net, local)), Tree()

    def aggregate(self, server, uploads):
        others = Tree({str(n): u.model for n, u in enumerate(uploads)})
        return server.state.replace(others=others, model=uploads[0].model)


def test_lanes_take_a_broadcast_in_which_nothing_is():
    expected, _ = reference(EmptyBranch(), PLAN)
    assert same(expected.state, run(EmptyBranch(), network(), Lanes(network(), federation(), lanes=2), PLAN).state)


def test_engines_tell_of_every_client_that_has_answered(pools):
    engines = [Sequential(network(), federation()), Lanes(network(), federation(), lanes=2), pools(3, 10**6)[0]]
    for engine in engines:
        told = []
        engine.heard = lambda *said, told=told: told.append(said)
        run(FedAvg(), network(), engine, replace(PLAN, rounds=2, cohort=Everyone()), round=0)
        assert told == [(n, len(SIZES)) for n in range(1, len(SIZES) + 1)] * 2


def test_observing_changes_nothing():
    """Personal evaluation after every round leaves state and memories as they are."""

    def look(server, job, replies):
        stage = job.stage.errand(Evaluate(base=job.stage.algorithm), epochs=1)
        watched.run(replace(job, stage=stage, round=server.round), Everyone()(server.population, 0))

    watched = Sequential(network(), federation())
    seen = run(Scaffold(), network(), watched, PLAN, observe=look)
    unseen, engine = reference(Scaffold(), PLAN)
    assert same(seen.state, unseen.state)
    assert all(same(engine.memories.get(i), watched.memories.get(i)) for i in engine.memories)
    assert list(engine.memories) == list(watched.memories)


@pytest.mark.parametrize(
    "name",
    [
        "scaffold",
        "feddyn",
        "scaffold+ft",
        "local",
        "fedproto",
        "fedrod",
        "pfedme",
        "fedala",
        "feddbe",
        "scaffnew",
        "fedamp",
        "fedpac",
        "fedfomo",
    ],
)
def test_resume_from_bytes_after_every_round(name, tmp_path):
    from fedlens.core.wire import decode, encode

    recipe, plan = CASES[name]
    expected, engine = reference(recipe, plan)
    rounds = len(timetable(recipe, plan))
    for stop in range(1, rounds):
        folder = tmp_path / str(stop)
        first = Sequential(network(), federation(), memories=Memories(folder))

        class Stopped(Exception):
            pass

        def halt(server, job, replies, stop=stop, first=first):
            if server.round == stop:
                first.save(stop)
                raise Stopped(encode(server.state))

        with pytest.raises(Stopped) as caught:
            run(recipe, network(), first, plan, observe=halt)
        second = Sequential(network(), federation(), memories=Memories(folder, round=stop))
        found = run(recipe, network(), second, plan, state=decode(caught.value.args[0]), round=stop)
        assert same(expected.state, found.state)
        assert all(same(engine.memories.get(i), second.memories.get(i)) for i in engine.memories)


# ---- what a step may do ----
def fake_step(algorithm, stage, batch_size=4):
    """Run a step on tensors without values: a step that looks at one on the host fails."""
    net, engine = network(), Sequential(network(), federation())
    server = Server(net, Tree(), engine.population)
    server = replace(server, state=initial_state(replace(stage, algorithm=algorithm), server))
    job = Job(replace(stage, algorithm=algorithm), algorithm.broadcast(server), Tree(), 0, 0, 0, 0)
    client, _ = engine.open(job, 0)
    local = algorithm.begin(client).clone()
    index = client.data.index[torch.arange(batch_size)]
    batch = engine.federation.data.batch(index, torch.ones(batch_size), torch.tensor(7))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = lambda tree: tree.map(mode.from_tensor)  # noqa: E731
        received, memory = fake(client.received), fake(client.memory)
        view = client.inside(received=received, memory=memory, phase=algorithm.phase(0))
        algorithm.step(view, fake(local), fake(batch))


@pytest.mark.parametrize("name", RECIPES)
def test_steps_are_recordable(name):
    for stage in dict.fromkeys(stage for stage, _, _ in timetable(*CASES[name])):
        fake_step(stage.algorithm, stage)


@dataclass(frozen=True)
class Peeks(Algorithm):
    def step(self, client, local, batch):
        return local if float(batch.weight.sum()) < 4 else super().step(client, local, batch)


@dataclass(frozen=True)
class Careless(Algorithm):
    def loss(self, client, weights, batch, out):
        client.net.forward(client.received.model, batch.x, train=True)  # advances statistics that are not its own
        return super().loss(client, weights, batch, out)


@dataclass(frozen=True)
class Baked(Algorithm):
    def step(self, client, local, batch):
        grads = self.gradient(client, local, batch)
        torch._foreach_add_(local.params.leaves(), grads.leaves(local.params), alpha=-client.optimizer.lr)
        return local


def test_a_step_that_reads_a_value_is_caught():
    with pytest.raises(Exception, match=r"data-dependent|DataDependent|_local_scalar_dense"):
        fake_step(Peeks(), PLAN)


def test_writing_what_was_received_is_caught():
    with pytest.raises(ClientFailed, match=r"received/model/buffers/norm.running_mean is read-only"):
        run(Careless(), network(), Sequential(network(), federation(), checked=True), PLAN)


def test_a_rate_read_inside_a_step_is_loud():
    state = run(Baked(), network(), Sequential(network(), federation()), PLAN).state
    assert state.model.params["conv.bias"].isnan().all()


def test_begin_is_copied():
    """Without the copy, in-place steps would write into the server's own model."""
    net, engine = network(), Sequential(network(), federation())
    server = Server(net, Algorithm().setup(Server(net, Tree(), 6)), 6)
    before = server.state.clone()
    engine.run(
        Job(replace(PLAN, algorithm=FedAvg(), weighting=lambda c: 1.0), server.state, Tree(), 0, 0, 0, 0), [0, 2]
    )
    assert same(before, server.state)


def test_a_failing_client_is_named():
    @dataclass(frozen=True)
    class Fails(Local):
        def finish(self, client, local):
            raise ZeroDivisionError("no such thing")

    with pytest.raises(ClientFailed, match=r"client \d failed in round 1: ZeroDivisionError: no such thing"):
        run(Fails(), network(), Sequential(network(), federation()), PLAN)


def test_a_worker_reads_no_memory_of_clients_it_does_not_own(tmp_path):
    """After a resume its owner writes a new version and the old one is pruned; the other worker knows but that one."""
    engine = Workers(build, SIZES, 2, Storage(tmp_path))
    jobs = []
    plan = replace(PLAN, cohort=Everyone())
    run(Scaffold(), network(), engine, plan, observe=lambda server, job, replies: jobs.append(job))
    engine.save(3)
    engine.close()
    engine = Workers(build, SIZES, 2, Storage(tmp_path, round=3))
    job = replace(jobs[-1], round=3)
    try:
        for client in (2, 1):
            engine.run(job, [client])
        engine.save(4)
        prune(tmp_path, before=4, after=4)
        look = job.stage.errand(Evaluate(base=job.stage.algorithm))
        assert [reply.client for reply in engine.run(replace(job, stage=look, round=4), [1])] == [1]
    finally:
        engine.close()
