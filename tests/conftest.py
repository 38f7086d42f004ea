import os

# Before torch is imported anywhere: some CPUs advertise matrix instructions that crash.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

from forks import Nursery

pytest.register_assert_rewrite("baselines", "personal", "small", "terms", "textbook", "traces")


def pytest_collection_modifyitems(items):
    """Folders and files that need more than Python have a marker, so that one can leave them out."""
    for item in items:
        for marker in ("docs", "flower"):
            if item.path.parent.name == marker:
                item.add_marker(marker)
        for marker in ("browser", "ray"):
            if item.path.stem.endswith(marker):
                item.add_marker(marker)


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _cache(tmp_path_factory):
    """Decoded data of the tests go where the tests live, those of all their processes to one place."""
    base = tmp_path_factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    os.environ["FEDLENS_CACHE"] = os.environ.get("FEDLENS_TEST_CACHE", str(place))


@pytest.fixture(scope="session")
def everyone(tmp_path_factory, _cache):
    nursery = Nursery(tmp_path_factory.mktemp("nursery"))
    yield nursery
    nursery.close()


@pytest.fixture
def nursery(everyone):
    """Carries out commands of `fedlens`, each in a process of its own."""
    yield everyone
    everyone.clean()
