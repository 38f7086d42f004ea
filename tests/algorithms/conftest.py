"""What several methods' tests start from."""

import pytest

from baselines import write_images


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images of clients, and public ones."""
    where = tmp_path_factory.mktemp("images")
    write_images(where / "own.npz", 120, 8, 1, 0)
    write_images(where / "public.npz", 60, 12, 3, 1)  # other sides and colours
    return where
