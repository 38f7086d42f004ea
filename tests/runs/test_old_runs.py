"""A run folder of the version before run folders had a format number: 2 rounds of scaffold, with flat settings."""

import shutil
from pathlib import Path

import pytest

import fedlens
from fedlens import config
from fedlens.core.errors import BadInput
from fedlens.runs.diff import differences
from fedlens.runs.folder import FORMAT, RunFolder
from fedlens.ui.follow import Followed

OLD = Path(__file__).parent / "run-format1"


@pytest.fixture
def old(tmp_path):
    return Path(shutil.copytree(OLD, tmp_path / "format1"))


def test_settings_are_read_under_their_names_of_today(old):
    experiment = config.read(old / "config.yaml")
    where = experiment.execution
    assert (where.device, where.out, experiment.policy.min_replies) == ("cpu", "format1", 2)
    assert "format" not in RunFolder(old).passport()


def test_it_is_shown_and_explained(old, nursery):
    for words in (["report"], ["explain", "--images", "2", "--methods", "gradient"], ["diff", str(OLD)]):
        ended = nursery(words[0], str(old), *words[1:], cwd=old.parent)
        assert ended.code == 0, ended.err
    seen = Followed(old, "format1")
    seen.refresh()
    assert seen.row["state"] == "done"


def test_it_goes_on_to_the_bits_of_a_new_run(old, tmp_path):
    result = fedlens.resume(old, ["rounds=3"])
    experiment = config.read(old / "config.yaml").with_execution(out=str(tmp_path / "new"))
    fedlens.run(experiment)
    assert result.rounds == 3 and list(differences(old, tmp_path / "new")) == []
    assert RunFolder(tmp_path / "new").passport()["format"] == FORMAT


def test_a_run_of_a_later_version_is_refused_by_its_number(old):
    folder = RunFolder(old)
    folder.write_json("passport.json", {**folder.passport(), "format": FORMAT + 1})
    with pytest.raises(BadInput, match=f"has format {FORMAT + 1}"):
        fedlens.resume(old, ["rounds=3"])
