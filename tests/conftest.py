import os

# Before torch is imported anywhere: some CPUs advertise matrix instructions that crash.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _cache(tmp_path_factory):
    """Decoded data of the tests go where the tests live."""
    os.environ["FEDLENS_CACHE"] = os.environ.get("FEDLENS_TEST_CACHE", str(tmp_path_factory.mktemp("cache")))
