import numpy as np
import torch

from fedlens.core.rng import (
    fold,
    generator,
    key,
    normal,
    numpy_generator,
    privacy_coins,
    privacy_noise,
    seeded,
    system_noise,
    uniform,
)


def splitmix64(seed: int, count: int) -> list[int]:
    """The textbook recursion on unsigned integers."""
    mask, state, found = (1 << 64) - 1, seed, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        found.append(z ^ (z >> 31))
    return found


def test_uniform_is_splitmix64():
    seed = key("test")
    expected = [number >> 40 for number in splitmix64(seed, 100)]
    assert (uniform(torch.tensor(seed), 100) * 2**24).long().tolist() == expected


def test_draws_look_random():
    u, n = uniform(torch.tensor(key(1)), 200_000), normal(torch.tensor(key(2)), 200_000)
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.003 and abs(u.var() - 1 / 12) < 0.001
    assert abs(n.mean()) < 0.01 and abs(n.std() - 1) < 0.01 and n.isfinite().all()
    assert abs(torch.corrcoef(torch.stack([u[:-1], u[1:]]))[0, 1]) < 0.01


def test_purposes_share_no_numbers():
    seed = torch.tensor(key(0, "step"))
    a, b = (uniform(fold(seed, purpose), 1000) for purpose in ("flip", "crop"))
    assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 0.1
    assert not torch.equal(a, uniform(seed, 1000))


def test_keys_depend_on_all_parts_and_nothing_else():
    assert key(0, "batches", 1, 2) == key(0, "batches", 1, 2)
    assert len({key(0, "a", i, j) for i in range(30) for j in range(30)}) == 900
    assert key(1, 23) != key(12, 3)


def test_global_generators_are_left_alone():
    torch_before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    with seeded(5):
        first = torch.rand(3)
    with seeded(5):
        assert torch.equal(first, torch.rand(3))
    generator(1), numpy_generator(1).random(3), uniform(torch.tensor(3), 4)
    assert torch.equal(torch_before, torch.get_rng_state())
    assert (numpy_before == np.random.get_state()[1]).all()  # noqa: NPY002


# ---- noise that protects somebody ----
def test_simulated_noise_is_the_seeds():
    seed = torch.tensor(key("noise"))
    assert torch.equal(privacy_noise(seed, 50), normal(seed, 50))
    assert torch.equal(privacy_coins(seed, 50), uniform(seed, 50))


def test_system_noise_is_nobodys_seed():
    seed = torch.tensor(key("noise"))
    with system_noise():
        draws = [privacy_noise(seed, 200_000) for _ in range(2)]
        coins = [privacy_coins(seed, 200_000) for _ in range(2)]
    for pair in (draws, coins):
        assert abs(torch.corrcoef(torch.stack(pair))[0, 1]) < 0.02  # the same question, other numbers
    noise, coin = draws[0], coins[0]
    assert noise.dtype == torch.float64 and noise.isfinite().all()
    assert abs(noise.mean()) < 0.015 and abs(noise.var() - 1) < 0.02 and abs((noise**4).mean() - 3) < 0.15
    assert coin.min() >= 0 and coin.max() < 1 and abs(coin.mean() - 0.5) < 0.005
    assert torch.equal(privacy_noise(seed, 5), normal(seed, 5))  # seeded again outside


def test_training_stays_seeded_under_system_noise():
    with system_noise():
        assert torch.equal(uniform(torch.tensor(3), 9), uniform(torch.tensor(3), 9))
