import gc
import os
import subprocess
from dataclasses import replace

# Before torch is imported anywhere: some CPUs advertise matrix instructions that crash.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ.pop("COLUMNS", None)  # xdist gives its workers a width; commands that write into files have none

import pytest

from forks import Nursery, forked_workers, one_command_line

# Nothing here imports torch before a test runs: the process that only hands tests out would wait for it, too.
pytest.register_assert_rewrite("baselines", "personal", "small", "terms", "textbook", "traces")


# What `start.py test --fast` leaves out of the core and the methods: readings of papers, hostile replies, compositions.
THOROUGH = (
    *("test_hostile", "test_wire", "test_reductions", "test_scaffold_stability", "test_personal", "test_public_data"),
    *("test_compose", "test_drift", "test_every_method_runs_with_every_uplink"),
    *("test_fedsls", "test_fedxds", "test_pse", "test_spatl"),
)
KEPT = (  # the oracles of these last four
    *("test_fedsls", "test_what_leaves_by_a_slow_loop", "test_a_step_by_hand", "test_pse_by_hand"),
    *("test_the_server_puts_together_what_clients_gave", "test_aggregation_filter_by_filter"),
    "test_controls_of_server_and_clients",
    "test_with_everything_selected_it_is_scaffold_with_a_private_head",
)


TRACED = ("test_hostile", "test_wire", "test_engines_agree", "test_residency", "test_mutants")


def pytest_collection_modifyitems(items):
    """Folders and files that need more than Python have a marker, so that one can leave them out.

    Those that compare with the runs of traces.py come first: one process makes each of these runs once.
    """
    items.sort(key=lambda item: item.path.stem not in TRACED)
    for item in items:
        file, name = item.path.stem, item.originalname
        if (file in THOROUGH or name in THOROUGH or file.endswith("_readings")) and name not in KEPT:
            item.add_marker("thorough")
        for marker in ("docs", "flower"):
            if item.path.parent.name == marker:
                item.add_marker(marker)
        for marker in ("browser", "ray"):
            if item.path.stem.endswith(marker):
                item.add_marker(marker)


def pytest_collection_finish():
    """What was imported stays: garbage is looked for in what tests make."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _forks():
    """Worker processes are forks: each would import torch for two seconds. Commands are put together once."""
    forked_workers()
    one_command_line()


@pytest.fixture(autouse=True, scope="session")
def _no_pdf():
    """Figures as PNG and SVG: a third kind is drawn where all three are compared."""
    from fedlens.plots import style

    del style.KINDS[".pdf"]


@pytest.fixture
def every_kind(monkeypatch):
    """Figures in all kinds."""
    from fedlens.plots import style

    monkeypatch.setitem(style.KINDS, ".pdf", {"CreationDate": None})


@pytest.fixture
def whole_processes(monkeypatch):
    """Worker processes as users have them."""
    from fedlens.engines import fork_server

    monkeypatch.setattr(fork_server, "subprocess", subprocess)


@pytest.fixture(autouse=True, scope="session")
def _cache(tmp_path_factory):
    """Decoded data of the tests go where the tests live, those of all their processes to one place."""
    base = tmp_path_factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    os.environ["FEDLENS_CACHE"] = os.environ.get("FEDLENS_TEST_CACHE", str(place))


@pytest.fixture(scope="module")
def fewer_images(tmp_path_factory):
    """Every fourth image of the digits and of clothing, some of CIFAR-10's last file, in a cache of their own."""
    from fedlens.data.images import Decoded
    from fedlens.data.sources.small import Cifar10, Mnist, Mnist5k

    with pytest.MonkeyPatch.context() as patch:
        for kind in (Mnist5k, Mnist):

            def read(self, *files, whole=kind._read):
                found = whole(self, *files)
                return replace(found, train=found.train[::4], test=found.test[::4])

            patch.setattr(kind, "_read", read)

        def some(self, files, read):
            x, y = read(files[-1], "labels")
            return Decoded.parts((x[::10], y[::10]), (x[5::40], y[5::40]), self.classes)

        patch.setattr(Cifar10, "_read", some)
        patch.setenv("FEDLENS_CACHE", str(tmp_path_factory.getbasetemp() / "fewer"))
        yield


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
