"""Whom a round asks, how long it waits, when it counts: against plain lists, and after a kill."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from fedlens import config
from fedlens.algorithms import FedAU, FedAvg, Scaffold
from fedlens.core.check import Check
from fedlens.core.cohort import Everyone
from fedlens.core.dry_run import Rehearsal
from fedlens.core.errors import BadInput
from fedlens.core.memories import Memories
from fedlens.core.policy import RoundPolicy
from fedlens.core.replies import capped
from fedlens.core.rng import key
from fedlens.core.run import run
from fedlens.core.tree import Tree
from fedlens.engines.sequential import Sequential
from fedlens.experiment import Experiment
from recipes import RECIPES
from small import PLAN, SIZES, federation, network, same


class Absent(Sequential):
    """Clients that do not answer in (round, attempt), or answer late, by a function of both and the client."""

    def __init__(self, silent=lambda job, i: False, seconds=lambda job, i: 0.0, **more):
        super().__init__(network(), federation(), **more)
        self.silent, self.seconds, self.asked = silent, seconds, []

    def run(self, job, cohort):
        self.asked.append((job.round, job.attempt, list(cohort)))
        there = [i for i in cohort if not self.silent(job, i)]
        return [replace(reply, seconds=self.seconds(job, reply.client)) for reply in super().run(job, there)]


def played(engine, policy=RoundPolicy(), recipe=Scaffold(), plan=PLAN, **more):  # noqa: B008  all are constants
    seen = []
    server = run(
        recipe, engine.net, engine, plan, policy=policy, observe=lambda s, j, answers: seen.append(answers), **more
    )
    return server, seen


def drawn(round: int, plan=PLAN) -> list[int]:
    return list(plan.cohort(len(SIZES), key(0, "cohort", round)))


# ---- whom ------------------------------------------------------------------------------------------------------------
def test_the_default_asks_the_cohort_once():
    server, _ = played(engine := Absent())
    assert engine.asked == [(round, 0, drawn(round)) for round in range(3)]
    assert "standing" not in server.state


@pytest.mark.parametrize(("share", "more"), [(0.01, 1), (0.34, 2), (1.0, 3), (9.0, 3)])
def test_oversampling_asks_more_and_uses_all(share, more):
    _, seen = played(engine := Absent(), RoundPolicy(oversample=share))
    for (round, _, asked), answers in zip(engine.asked, seen, strict=True):
        assert asked == sorted(set(asked)) and set(drawn(round)) < set(asked) and len(asked) == 3 + more
        assert [reply.client for reply in answers] == asked


def test_shares_are_decimal():
    """In binary 0.07 of 100 is a little more than 7."""
    assert len(RoundPolicy(oversample=0.07).asked(range(100), 200, Tree(), 0, 1)) == 107


def test_extra_clients_are_drawn_evenly():
    policy, count = RoundPolicy(oversample=1.0), Counter()
    for seed in range(3000):
        count.update(set(policy.asked([0, 1], 7, Tree(), 0, seed)) - {0, 1})
    assert set(count) == {2, 3, 4, 5, 6} and all(abs(n - 1200) < 5 * (1200 * 0.6) ** 0.5 for n in count.values())


def test_resting_against_plain_lists():
    """A client that fails twice in a row rests for three rounds; the rest is bookkeeping, done here by hand."""
    plan = replace(PLAN, rounds=25)
    flaky = {(round, i) for round in range(25) for i in range(6) if random.Random(round * 6 + i).random() < 0.45}
    engine = Absent(lambda job, i: (job.round, i) in flaky)
    server, _ = played(engine, RoundPolicy(max_failures=2, cooldown=3), FedAvg(), plan)
    failed, until = [0] * 6, [0] * 6
    for round, _, asked in engine.asked:
        awake = [i for i in range(6) if until[i] <= round]
        usual = [i for i in drawn(round) if i in awake]
        assert set(usual) <= set(asked) <= set(awake) and len(asked) == min(3, len(awake))
        for i in asked:
            failed[i] = failed[i] + 1 if (round, i) in flaky else 0
            if failed[i] == 2:
                failed[i], until[i] = 0, round + 4
    assert max(until) > 10
    assert server.state.standing.failed.tolist() == failed and server.state.standing.until.tolist() == until


def test_standing_survives_stages_that_forget():
    """FedXDS begins anew after its warm-up: what is known about clients stays."""
    engine = Absent(lambda job, i: i == 2)
    server, _ = played(engine, RoundPolicy(max_failures=1, cooldown=99), RECIPES["fedxds"])
    assert sum(2 in asked for _, _, asked in engine.asked) == 1 and len(engine.asked) > 4
    assert int(server.state.standing.until[2]) > 99


# ---- when ------------------------------------------------------------------------------------------------------------
def test_late_replies_are_not_used_and_the_client_remembers():
    slow = Absent(seconds=lambda job, i: 31.0 if (i + job.round) % 2 else 30.0)
    server, seen = played(slow, RoundPolicy(deadline=30.0))
    assert any(answers.late for answers in seen)
    assert all(reply.seconds > 30 for answers in seen for reply in answers.late)

    class Deaf(Sequential):
        """All train, and half of the replies are thrown away."""

        def run(self, job, cohort):
            return [reply for reply in super().run(job, cohort) if not (reply.client + job.round) % 2]

    deaf = Deaf(network(), federation())
    expected, _ = played(deaf)
    assert same(server.state, expected.state)
    assert all(same(slow.memories.get(i), deaf.memories.get(i)) for i in range(6))
    assert same(played(Absent(seconds=lambda job, i: 1e9))[0].state, played(Absent())[0].state)  # no deadline


def test_too_few_replies_leave_the_state():
    """Rounds 0 and 2 have one reply of two that are needed."""
    engine = Absent(lambda job, i: job.round != 1 and i != drawn(job.round)[0])
    states = []
    run(
        FedAvg(),
        engine.net,
        engine,
        PLAN,
        policy=RoundPolicy(min_replies=2),
        observe=lambda server, job, answers: states.append((server.state, answers)),
    )
    first = FedAvg().setup(type("Server", (), {"net": engine.net}))
    assert same(states[0][0], first) and not same(states[1][0], first) and same(states[2][0], states[1][0])
    assert states[0][1].void == "it has 1 usable replies, and policy.min_replies is 2" and not states[1][1].void


def test_the_silent_are_asked_again():
    def silent(job, i):
        return job.attempt < (i % 3)  # 0, 3 answer at once, 1, 4 when asked again, 2, 5 at the third time

    plan = replace(PLAN, cohort=Everyone())
    for least, retries, attempts in ((2, 5, 1), (3, 5, 2), (5, 5, 3), (6, 1, 2), (6, 0, 1), (6, 9, 3)):
        engine = Absent(silent)
        _, seen = played(engine, RoundPolicy(min_replies=least, retries=retries), FedAvg(), replace(plan, rounds=1))
        assert [(attempt, asked) for _, attempt, asked in engine.asked] == [
            (0, [0, 1, 2, 3, 4, 5]),
            (1, [1, 2, 4, 5]),
            (2, [2, 5]),
        ][:attempts]
        assert len(seen[0]) == 2 * attempts and bool(seen[0].void) == (2 * attempts < least)
        assert [r.client for r in seen[0]] == sorted(r.client for r in seen[0])
    whole = played(Absent(silent), RoundPolicy(min_replies=6, retries=2), plan=plan)[0]
    assert same(whole.state, played(Absent(), plan=plan)[0].state)  # nothing tells how often somebody was asked


# ---- claims ----------------------------------------------------------------------------------------------------------
def lowered_by_search(weights, share):
    """The largest cap under which nobody has more than the share: by halving."""
    low, high = 0.0, max(weights)
    for _ in range(200):
        cap = (low + high) / 2
        cut = [min(w, cap) for w in weights]
        low, high = (cap, high) if max(cut) <= share * sum(cut) * (1 + 1e-13) else (low, cap)
    return [min(w, low) for w in weights]


def test_capped_weights():
    draw = random.Random(3)
    for _ in range(300):
        weights = [draw.choice([0.0, 1.0, draw.random(), 100 * draw.random()]) for _ in range(draw.randint(2, 9))]
        weights[0] = weights[0] or 1.0
        positive = sum(w > 0 for w in weights)
        share = draw.uniform(1 / positive + 0.01, 1) if positive > 1 else 0.99
        if positive == 1:
            continue
        found = capped(weights, share)
        assert found == pytest.approx(lowered_by_search(weights, share), rel=1e-9)
        assert max(found) <= share * sum(found) * (1 + 1e-12)
        assert capped(weights, 0.999999) == weights or max(weights) > 0.999999 * sum(weights)
    assert capped([4.0, 2.0, 8.0], 0.3) == [2.0, 2.0, 2.0] and capped([7.0], 0.5) == [7.0] and capped([0.0], 0.5) == [0]


def test_a_claim_is_bounded():
    """One client says that it weighs a million times as much; by hand, with the cap at two fifths of the sum."""

    class Boastful(Absent):
        def run(self, job, cohort):
            replies = super().run(job, cohort)
            first = replies[0]
            return [replace(first, upload=first.upload.replace(weight=first.upload.weight * 1e6)), *replies[1:]]

    plan = replace(PLAN, rounds=1)
    found, seen = played(Boastful(), RoundPolicy(max_weight_share=0.4), FedAvg(), plan)
    weights = [float(reply.upload.weight) for reply in seen[0]]
    shares = lowered_by_search(weights, 0.4)
    model = FedAvg().setup(type("Server", (), {"net": network()})).model
    for reply, share in zip(seen[0], shares, strict=True):
        model = model + reply.upload.delta * (share / sum(shares))
    apart = max(float(leaf.abs().max()) for leaf in (model - found.state.model).leaves())
    assert apart < 1e-12  # the search stops at 1e-13
    assert shares[0] / sum(shares) == pytest.approx(0.4)
    for recipe in (FedAvg(), FedAU()):
        free, bound = (played(Absent(), RoundPolicy(max_weight_share=claim), recipe)[0] for claim in (None, 0.99))
        assert same(free.state, bound.state)  # nobody claims so much


# ---- as configuration ------------------------------------------------------------------------------------------------
def test_settings():
    words = [
        "policy.oversample=0.3",
        "policy.deadline=20",
        "policy.min_replies=3",
        "policy.retries=1",
        "policy.max_failures=2",
    ]
    experiment = config.read(None, [*words, "policy.cooldown=5", "policy.max_weight_share=0.5", "faults.dropout=0.1"])
    assert experiment.policy == RoundPolicy(0.3, 20.0, 3, 1, 2, 5, max_weight_share=0.5)
    assert config.resolve(Experiment, config.to_dict(experiment)) == experiment
    for word, sentence in (
        ("policy.deadline=0", "policy.deadline is 0, but it should be greater than 0"),
        ("policy.deadlin=5", "did you mean 'policy.deadline'"),
        ("policy.max_weight_share=1", "policy.max_weight_share is 1, but it should be less than 1"),
        ("faults.dropout=30", "faults.dropout is 30, but it should be less than or equal to 1"),
        ("faults.dropouts=0.3", "did you mean 'faults.dropout'"),
        ("policy=strict", "policy is 'strict', but it should have fields such as oversample"),
    ):
        with pytest.raises(BadInput, match=sentence):
            config.read(None, [word])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["policy.oversample=0.1"], "accounts for cohorts as they are drawn"),
        (["policy.max_failures=3"], "accounts for cohorts as they are drawn"),
        (["faults.dropout=0.1", "uplink.dp.trust=aggregator", "weighting=uniform"], "everyone's noise"),
        (["defences=median", "uplink.dp.trust=aggregator", "weighting=uniform"], "the sum of all uploads"),
    ],
)
def test_privacy_accounts_are_not_made_wrong(words, sentence):
    with pytest.raises(BadInput, match=sentence):
        config.read(None, ["uplink=dp", *words]).resolved()


# ---- after a kill ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("after", [1, 4, 7])
def test_resumed_to_the_same_bits(tmp_path, after):
    policy, plan = (
        RoundPolicy(oversample=0.5, max_failures=1, cooldown=2, min_replies=2, retries=1),
        replace(PLAN, rounds=9),
    )

    def flaky(job, i):
        return random.Random(job.round * 100 + 10 * job.attempt + i).random() < 0.5

    whole, seen = played(Absent(flaky), policy, plan=plan)
    kept = []

    class Killed(Exception):
        pass

    def halt(server, job, answers):
        if server.round == after:
            kept.append(server.state.clone())
            raise Killed

    first = Absent(flaky, memories=Memories(tmp_path))
    with pytest.raises(Killed):
        run(Scaffold(), first.net, first, plan, policy=policy, observe=halt)
    first.save(after)
    second = Absent(flaky, memories=Memories(tmp_path, round=after))
    rest, more = played(second, policy, plan=plan, state=kept[0], round=after)
    assert same(rest.state, whole.state) and any(answers.missing for answers in seen)
    assert [[r.client for r in a] for a in more] == [[r.client for r in a] for a in seen[after:]]


def test_a_check_asks_for_one_rehearsal_a_stage():
    net, data, made = network(), federation(), []

    def counted(job):
        made.append(job)
        return Rehearsal(Sequential, net, data.data)(job)

    run(RECIPES["fedsls"], net, Sequential(net, data), PLAN, check=Check(counted, 10))
    assert len(made) == 2  # weighing, training
