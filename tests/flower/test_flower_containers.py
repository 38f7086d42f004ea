"""The container files agree with themselves and with the commands they name; there is no Docker here to run them."""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from fedlens.cli.deploy import deploy
from fedlens.flower import launch, membership

FILES = Path(__file__).parents[2] / "docs" / "deploy"
COMPOSE, KUBERNETES = (FILES / name for name in ("compose.yaml", "kubernetes.yaml"))
needs_flower = pytest.mark.skipif(
    importlib.util.find_spec("flwr") is None, reason="flwr is not installed: pip install 'fedlens[flower]'"
)


def parsed(words: list[str]):
    """(command, its values) of `fedlens deploy ...`, by the command line's own parser; nothing is carried out."""
    assert words[:2] == ["fedlens", "deploy"], words
    group = typer.main.get_command(deploy)
    name, *rest = words[2:]
    command = group.commands[name]  # pyright: ignore[reportAttributeAccessIssue]
    return name, command.make_context(name, list(rest)).params


def instructions(path: Path) -> list[list[str]]:
    """The `fedlens deploy` commands in the comments at a file's top, lines that go on joined."""
    text = re.sub(r"\\\n#", "", path.read_text())
    found = [re.search(r"fedlens deploy .*", line) for line in text.splitlines() if line.startswith("#")]
    return [shlex.split(each[0]) for each in found if each]


def inited(path: Path, folder: Path) -> Path:
    """The federation that a file's instructions make."""
    (init,) = (params for name, params in map(parsed, instructions(path)) if name == "init")
    launch.init(folder, init["words"], init["host"], init["port"], init["listen"])
    return folder


@pytest.mark.parametrize("path", [COMPOSE, KUBERNETES], ids=lambda path: path.name)
def test_what_the_comments_say_can_be_typed(path):
    joining = ["join", "admit"] if path is KUBERNETES else []
    assert [parsed(words)[0] for words in instructions(path)] == ["init", "certs", *joining, "run"]


def test_compose(tmp_path):
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    folder = inited(COMPOSE, tmp_path / "federation")
    link = launch.Link.of(folder / "server")
    assert link.host in services and link.listen == "0.0.0.0"  # nodes find the server by its service's name
    nodes = {name: service for name, service in services.items() if name != link.host}
    experiment = launch.experiment_of(folder)
    assert {name.removeprefix("node-") for name in nodes} == {str(client) for client in range(experiment.clients)}
    for name, service in services.items():
        command, values = parsed(service["command"])
        place = str(values["folder" if command == "server" else "place"])
        ((here, there),) = (volume.split(":") for volume in service["volumes"])
        assert command == ("server" if name == link.host else "node") and values["start"] and values["stay"]
        made = (
            "federation" if name == link.host else f"federation/nodes/{name.removeprefix('node-')}"
        )  # by certs --trial
        assert there == place and here == f"./{made}"
        assert service["image"] == "fedlens" and service["cap_drop"] == ["ALL"]
    assert all(service["depends_on"] == [link.host] for service in nodes.values())
    assert Path(experiment.execution.out).is_relative_to("/federation")  # the run outlives its container
    assert "docker build -t fedlens " in COMPOSE.read_text()


def test_kubernetes(tmp_path):
    documents = list(yaml.safe_load_all(KUBERNETES.read_text()))
    found = {(each["kind"], each["metadata"]["name"]): each for each in documents}
    assert len(found) == len(documents)
    folder = inited(KUBERNETES, tmp_path / "federation")
    link = launch.Link.of(folder / "server")
    service, server = found["Service", link.host], found["StatefulSet", link.host]["spec"]
    assert [port["port"] for port in service["spec"]["ports"]] == [link.port]
    assert server["serviceName"] == link.host
    assert service["spec"]["selector"].items() <= server["template"]["metadata"]["labels"].items()
    (container,) = server["template"]["spec"]["containers"]
    assert [port["containerPort"] for port in container["ports"]] == [link.port]
    for (kind, _), each in found.items():
        if kind not in ("StatefulSet", "Deployment"):
            continue
        spec = each["spec"]
        pod = spec["template"]["spec"]
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
        (container,) = pod["containers"]
        claims = {claim["metadata"]["name"] for claim in spec.get("volumeClaimTemplates", [])}
        volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
        assert {mount["name"] for mount in container["volumeMounts"]} == claims | volumes.keys()
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in found
            else:
                secret = volume["secret"]["secretName"]
                made = f"tar -C {secret} -cf {secret}.tar . && kubectl create secret generic {secret} "
                made += f"--from-file={secret}.tar"
                assert made in KUBERNETES.read_text()
        shell, flag, script = container["command"]
        command, values = parsed(shlex.split(script.rpartition("exec ")[2]))
        place = str(values["folder" if command == "server" else "place"])
        assert (shell, flag) == ("sh", "-c") and values["start"] and values["stay"]
        assert place in {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        assert subprocess.run(["sh", "-n", "-c", script]).returncode == 0
        assert pod["securityContext"]["runAsNonRoot"] and container["image"] == "fedlens"


def test_the_image_turns_off_what_deploy_turns_off():
    text = (FILES / "Dockerfile").read_text().replace("\\\n", " ")
    (line,) = (line for line in text.splitlines() if line.startswith("ENV "))
    assert dict(word.split("=") for word in line.split()[1:]) == launch.ENVIRONMENT
    assert "USER fedlens" in text and "'.[flower]' -c constraints.txt" in text


@needs_flower
def test_flower_has_the_words_that_are_printed(tmp_path):
    folder = tmp_path / "federation"
    launch.init(folder, ["clients=1", "cohort=1"], "127.0.0.1", 9092)
    membership.certify(folder, trial=True)
    lines = [
        ["flower-superlink", *launch.superlink(folder)[7:]],  # behind the door's own words
        launch.supernode(folder / "nodes" / "0"),
        *launch.registrations(folder),
        [*launch.submission(folder), "--stream", "--run-config"],
        launch.listing(),
    ]
    for program, *words in lines:
        commands = [word for word in words[:2] if re.fullmatch("[a-z]+", word) and program == "flwr"]
        told = subprocess.run(
            [shutil.which(program, path=launch.environment_of({})["PATH"]) or program, *commands, "--help"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        options = {word for word in words if word.startswith("--")}
        assert options <= set(re.findall(r"--[a-z][a-z-]+", told)), program
