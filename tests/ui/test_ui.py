"""`fedlens ui`: who may ask, what is answered, and that nothing is read twice."""

import fcntl
import http.client
import json
import os
import shutil
import socket
import threading
import time
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from fedlens import config
from fedlens.cli import main as cli
from fedlens.core.errors import BadInput, RunFailed
from fedlens.report.page import gather
from fedlens.runs import tables
from fedlens.runs.diff import differences
from fedlens.runs.folder import RunFolder
from fedlens.runs.rounds import Rounds
from fedlens.simulate import recorder
from fedlens.simulate import run as simulate
from fedlens.simulate.resume import resume
from fedlens.ui import clients, follow
from fedlens.ui.server import LiveServer
from fedlens.ui.watch import Watch
from test_report import SMALL, embedded, run

TOKEN = "sixteen-letters-or-more"


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    return run(tmp_path_factory.mktemp("runs") / "fedavg")


@pytest.fixture
def copy(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "runs" / "fedavg"))


@contextmanager
def serving(folder: Path, **options):
    with LiveServer(folder, **{"port": 0, **options}) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def ask(server: LiveServer, path: str, method: str = "GET", **headers: str):
    """(status, headers, body), with nothing added that a browser would add."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    headers = {"Host": f"127.0.0.1:{server.server_address[1]}", **{k.replace("_", "-"): v for k, v in headers.items()}}
    for name, value in headers.items():
        if value:
            connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body


def got(server: LiveServer, path: str):
    status, _, body = ask(server, path)
    assert status == 200, body
    return json.loads(body)


def synthetic(
    path: Path, rounds: int, clients: int = 10, looks: int = 0, done: bool = True, seed: int = 0, more: tuple = ()
) -> Path:
    """A run's folder with the same tables as a real one, of numbers drawn by chance."""
    experiment = config.read(None, ["data=mnist5k", f"rounds={rounds}", f"clients={clients}", f"seed={seed}", *more])
    folder = RunFolder(path)
    folder.checkpoints.mkdir(parents=True)
    (path / "config.yaml").write_text(config.to_yaml(experiment))
    counted = Rounds.of(experiment.timetable()).plain()
    where = {"engine": "sequential", "device_name": "none", "precision": "fp32"}
    card = {"split_hash": "", "data": {"name": "drawn", "sha256": ""}, "rounds": counted}
    folder.write_json("passport.json", card | where)
    draw = np.random.default_rng(seed)
    folder.write_json("label_counts.json", draw.integers(1, 50, (clients, 10)).tolist())
    grow(path, 0, rounds, rounds, clients=clients, looks=looks, seed=seed)
    if done:
        folder.write_json("result.json", {"rounds": rounds, "personal": {}})
    return path


def grow(path: Path, start: int, end: int, rounds: int, *, clients: int = 10, looks: int = 0, seed: int = 0) -> None:
    """Rounds start + 1 to end in one part of each table, and their lines of the log."""
    draw = np.random.default_rng((seed, start))
    metrics, sent = RunFolder(path).tables()
    lines = []
    for number in range(start + 1, end + 1):
        accuracy, where = (
            float(1 - draw.uniform(0.5, 1) / number**0.3),
            (number, None, "pooled test", "global", "examples"),
        )
        metrics.add(
            [
                (*where, "accuracy", accuracy),
                (*where, "loss", 2 * (1 - accuracy)),
                (number, None, "", "", "", "seconds", 0.5),
            ]
        )
        cohort = draw.choice(clients, min(clients, 100), replace=False).tolist()
        sent.add((number, client, kind, 1000, 10) for client in cohort for kind in ("download", "upload"))
        if looks and number % looks == 0:
            own = zip(range(clients), draw.uniform(0, 1, clients).tolist(), strict=True)
            metrics.add(
                (number, client, "client test", "personal after", "examples", "accuracy", value)
                for client, value in own
            )
        progress = recorder.Progress(
            number, rounds, accuracy, 2 * (1 - accuracy), 10**6 * number, 10**6 * number, 0.5 * number
        )
        lines.append(recorder.progress_line(progress))
    metrics.flush()
    sent.flush()
    with open(path / "log.txt", "a") as log:
        log.write("".join(f"{line}\n" for line in lines))


# ---- who may ask -----------------------------------------------------------------------------------------------------
PATHS = (
    "/../../etc/passwd",
    "/..%2f..%2fetc/passwd",
    "/%2e%2e/%2e%2e/etc/passwd",
    "//etc/passwd",
    "/live.js/../../server.py",
    "/assets/../server.py",
    "/etc/passwd",
    "/run?run=../secret",
    "/run?run=..%2fsecret",
    "/run?run=/etc",
    "/run?run=fedavg/..",
    "/run?run=fedavg%00",
    "/curves?run=fedavg/../fedavg",
    "/report?run=../secret",
    "/clients?run=%2e%2e/secret",
    "/picture?run=fedavg&name=../config.yaml",
    "/picture?run=fedavg&name=../../secret/x.png",
    "/picture?run=fedavg&name=/etc/x.png",
    "/picture?run=fedavg&name=explain-link.png",
    "/run?run=%ff%fe",
    "http://127.0.0.1/run?run=fedavg",
)


@pytest.mark.parametrize("path", PATHS)
def test_no_path_leads_out_of_the_folder(copy, tmp_path, path):
    shutil.copytree(copy, tmp_path / "secret")
    (copy / "figures").mkdir()
    (copy / "figures" / "explain-link.png").symlink_to(tmp_path / "secret" / "x.png")
    (tmp_path / "secret" / "x.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with serving(copy.parent) as server:
        status, _, body = ask(server, path)
        assert (
            status in (400, 404) and "error" in json.loads(body) and b"algorithm:" not in body and b"root:" not in body
        )


def test_names_that_lead_out_by_a_link_are_no_runs(copy, tmp_path):
    shutil.copytree(copy, tmp_path / "elsewhere" / "secret")
    (copy.parent / "link").symlink_to(tmp_path / "elsewhere")
    assert [row["name"] for row in Watch(copy.parent).since(0)["runs"]] == ["fedavg"]


FOREIGN = ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "10.1.2.3", "localhost.evil", "", "[::1"]


@pytest.mark.parametrize("host", [*FOREIGN, "127.0.0.1@evil.example:80x"])
def test_a_foreign_name_for_this_machine_is_refused(copy, host):
    """DNS rebinding: a site makes its own name point to 127.0.0.1; the browser then sends that name."""
    with serving(copy.parent) as server:
        for path, method in (
            ("/", "GET"),
            ("/events", "GET"),
            ("/run?run=fedavg", "GET"),
            ("/stop?run=fedavg", "POST"),
        ):
            assert ask(server, path, method, Host=host, Origin=f"http://{host}")[0] in (400, 403)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9999", "[::1]:8765", "LOCALHOST:80"])
def test_its_own_names_are_known_also_through_a_tunnel(copy, host):
    with serving(copy.parent) as server:
        assert ask(server, "/", Host=host)[0] == 200
        assert ask(server, "/run?run=fedavg", Host=host, Origin=f"http://{host}")[0] == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "http://localhost", "file://"])
def test_foreign_origins_are_refused(copy, origin):
    with serving(copy.parent) as server, held(copy):
        for path, method in (("/run?run=fedavg", "GET"), ("/events", "GET"), ("/stop?run=fedavg", "POST")):
            assert ask(server, path, method, Origin=origin)[0] == 403
        assert not (copy / "stop").exists()


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_other_sites_cannot_embed_anything(copy, site):
    with serving(copy.parent) as server:
        assert ask(server, "/run?run=fedavg", Sec_Fetch_Site=site, Sec_Fetch_Mode="no-cors")[0] == 403
        assert ask(server, "/report?run=fedavg", Sec_Fetch_Site=site, Sec_Fetch_Mode="navigate")[0] == 403
        assert ask(server, "/", Sec_Fetch_Site=site, Sec_Fetch_Mode="navigate")[0] == 200  # a link to the page itself
        assert ask(server, "/run?run=fedavg", Sec_Fetch_Site="same-origin")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "PROPFIND"])
def test_nothing_can_be_written(copy, method):
    before = {path: path.stat().st_mtime_ns for path in sorted(copy.rglob("*"))}
    with serving(copy.parent) as server:
        own = f"http://127.0.0.1:{server.server_address[1]}"
        for path in ("/", "/run?run=fedavg", "/live.js", "/events", "/nothing", "/clients?run=fedavg"):
            assert ask(server, path, method, Origin=own, Content_Length="0")[0] in (404, 405, 501)
        assert ask(server, "/stop?run=fedavg", "GET")[0] == 405
        for path in (
            "/",
            "/run?run=fedavg",
            "/clients?run=fedavg",
            "/client?run=fedavg&client=0",
            "/report?run=fedavg",
        ):
            assert ask(server, path)[0] == 200
    assert {path: path.stat().st_mtime_ns for path in sorted(copy.rglob("*"))} == before


def test_only_the_page_itself_can_stop_and_only_what_runs(copy):
    with serving(copy.parent) as server:
        own = {"Origin": f"http://127.0.0.1:{server.server_address[1]}", "Content_Length": "0"}
        status, _, body = ask(server, "/stop?run=fedavg", "POST", **own)
        assert status == 400 and json.loads(body) == {"error": "fedavg is not running"} and not (copy / "stop").exists()
        with held(copy):
            time.sleep(1.1)
            assert ask(server, "/stop?run=fedavg", "POST", Content_Length="0")[0] == 403  # no origin: no browser
            assert not (copy / "stop").exists()
            assert ask(server, "/stop?run=fedavg", "POST", **own)[0] == 200 and (copy / "stop").exists()


def test_a_body_is_not_taken_for_a_request(copy):
    with serving(copy.parent) as server:
        smuggled = b"GET /live.css HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        head = f"GET /icon.svg HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(smuggled)}\r\n\r\n".encode()
        with socket.create_connection(server.server_address[:2], 5) as line:
            line.sendall(head + smuggled)
            answer = b"".join(iter(lambda: line.recv(65536), b""))
        assert answer.count(b"HTTP/1.1 ") == 1 and b"image/svg+xml" in answer


def test_every_answer_is_guarded(copy):
    with serving(copy.parent) as server:
        for path in ("/", "/live.js", "/live.css", "/run?run=fedavg", "/nothing", "/report?run=fedavg"):
            headers = ask(server, path)[1]
            assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
            assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"
            assert (
                headers["Cross-Origin-Resource-Policy"] == "same-origin"
                and "Access-Control-Allow-Origin" not in headers
            )
            assert path.startswith("/report") or "default-src 'none'" in headers["Content-Security-Policy"]
        assert "default-src 'none'" in ask(server, "/report?run=fedavg")[2].decode()  # its own policy, in the page


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_others_are_let_in_only_with_a_token(copy, host):
    with pytest.raises(BadInput, match="give --token too"):
        LiveServer(copy.parent, host, 0)
    with pytest.raises(BadInput, match="sixteen or more"):
        LiveServer(copy.parent, host, 0, "short")


def test_a_token_is_asked_for_everywhere(copy):
    with serving(copy.parent, host="0.0.0.0", token=TOKEN) as server:
        cookie = f"fedlens-{server.server_address[1]}"
        for path in (
            "/",
            "/live.js",
            "/events",
            "/run?run=fedavg",
            "/nothing",
            f"/?token={TOKEN}x",
            "/?token=",
            "/?token=%C3%A9",
        ):
            status, headers, body = ask(server, path)
            assert status == 401 and "Set-Cookie" not in headers and TOKEN.encode() not in body
        assert ask(server, "/run?run=fedavg", Cookie=f"{cookie}={TOKEN[:-1]}")[0] == 401
        assert ask(server, "/run?run=fedavg", Cookie=f"other={TOKEN}")[0] == 401
        status, headers, _ = ask(server, f"/?token={TOKEN}")
        assert status == 200 and headers["Set-Cookie"] == f"{cookie}={TOKEN}; HttpOnly; SameSite=Strict; Path=/"
        assert ask(server, "/run?run=fedavg", Cookie=f"a=b; {cookie}={TOKEN}")[0] == 200
        assert ask(server, "/run?run=fedavg", Authorization=f"Bearer {TOKEN}")[0] == 200
        assert ask(server, "/", Host="evil.example", Authorization=f"Bearer {TOKEN}")[0] == 403


def test_the_command(copy, tmp_path, monkeypatch):
    def said(*words: str) -> str:
        result = CliRunner().invoke(cli.app, ["ui", *words])
        return str(result.exception)

    assert "there is no folder" in said(str(tmp_path / "nowhere"))
    assert "give --token too" in said(str(copy), "--host", "0.0.0.0", "--port", "0")
    assert "--host 192.0.2.1" in said(str(copy), "--host", "192.0.2.1", "--token", TOKEN)
    with serving(copy) as server:
        assert "is taken" in said(str(copy), "--port", str(server.server_address[1]))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: (_ for _ in ()).throw(socket.gaierror("unknown")))
    assert "is no address of this machine" in said(str(copy), "--host", "nowhere")


# ---- what is answered ------------------------------------------------------------------------------------------------
@contextmanager
def held(path: Path):
    """As if a process were at work on the run."""
    with open(path / "lock", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_rows_and_curves_are_those_of_the_tables(finished):
    with serving(finished.parent) as server:
        [row] = server.watch.since(0)["runs"]
        result = json.loads((finished / "result.json").read_text())
        assert (row["name"], row["state"], row["method"], row["data"]) == ("fedavg", "done", "fedavg", "mnist5k")
        assert row["family"] == "global"
        assert (row["round"], row["rounds"], row["accuracy"]) == (4, 4, result["accuracy"])
        metrics = pq.read_table(finished / "metrics.parquet").to_pylist()
        looked = [m["value"] for m in metrics if m["model"] == "global" and m["metric"] == "accuracy"]
        assert row["spark"] == [round(value, 4) for value in looked] and row["best"] == max(looked)
        found = got(server, "/curves?run=fedavg")["fedavg"]["curves"]
        assert found["global"]["accuracy"] == [six(v) for v in looked] and found["global"]["round"] == [1, 2, 3, 4]
        assert found["personal after"]["accuracy"][-1] == six(result["personal"]["after"]["mean"])
        seconds = accumulate(m["value"] for m in metrics if m["metric"] == "seconds")
        assert found["global"]["seconds"] == [six(value) for value in seconds]


def test_a_run_is_evaluated_on_the_model_that_the_report_judges_it_by(tmp_path):
    for method in ("fedavg", "local", "fedavg+ft"):
        run(tmp_path / method, f"algorithm={method}", "rounds=2")
    with serving(tmp_path) as server:
        rows = {row["name"]: row for row in server.watch.since(0)["runs"]}
    assert {name: row["evaluated_on"] for name, row in rows.items()} == {
        "fedavg": "global",
        "local": "personal after",
        "fedavg+ft": "fine-tuned",
    }
    for name, row in rows.items():
        shown = gather([tmp_path / name])
        assert shown["measure"] == row["evaluated_on"]
        assert row["accuracy"] == shown["groups"][0]["accuracy"][row["evaluated_on"]]["mean"]
    assert len(rows["fedavg+ft"]["spark"]) == 2  # of the global model on the way there


def test_a_run_says_what_leaves_and_whether_it_was_attacked(copy):
    """In the words of its report, and anew when a file about privacy comes or goes."""

    def said():
        [row] = Watch(copy.parent).since(0)["runs"]
        shown = gather([copy])
        assert row["privacy"] == shown["tiles"]["privacy"] and row["bytes"] == shown["groups"][0]["bytes"]["mean"]
        return row["privacy"], row["alarm"], row["shares"], row["tested"]

    assert said() == ("Unprotected updates, not tested by attack", False, False, False)
    followed = follow.Followed(copy, "fedavg")
    assert followed.refresh() and not followed.row["tested"]
    one = {"AUC": {"value": 0.9, "low": 0.8, "high": 0.95}}
    none = {"AUC": {"value": 0.5, "low": 0.4, "high": 0.6}}
    verdict = {"attack": "loss", "verdict": "Leaks.", "decisive": "AUC", "found": one, "chance": none}
    (copy / "audit.json").write_text(json.dumps({"verdicts": [verdict]}))
    assert said() == ("Leaks in an audit", True, False, True)
    assert followed.refresh() and followed.row["privacy"] == "Leaks in an audit"
    assert followed.safety()[0]["text"].endswith("Leaks.")
    verdict["found"] = none
    (copy / "audit.json").write_text(json.dumps({"verdicts": [verdict]}))
    assert said() == ("Unprotected updates, no leak found by 1 attack", False, False, True)
    (copy / "audit.json").unlink()
    assert followed.refresh() and followed.row["privacy"] == "Unprotected updates, not tested by attack"
    text = (copy / "config.yaml").read_text().replace("is: fedavg", "is: fedfed", 1)
    (copy / "config.yaml").write_text(text)
    assert Watch(copy.parent).since(0)["runs"][0]["privacy"].startswith("Shares data")
    (copy / "privacy.json").write_text("[1]")
    assert Watch(copy.parent).since(0)["runs"][0]["privacy"] == "Unknown: a file about privacy is damaged"


def test_a_client_is_what_the_tables_say(finished):
    counts = json.loads((finished / "label_counts.json").read_text())
    metrics = pq.read_table(finished / "metrics.parquet").to_pylist()
    sent = pq.read_table(finished / "bytes.parquet").to_pylist()
    with serving(finished.parent) as server:
        listed = got(server, "/clients?run=fedavg&order=worst")
        last = {m["client"]: m["value"] for m in metrics if m["client"] is not None and m["model"] == "personal after"
                and m["metric"] == "accuracy" and m["round"] == 4}  # fmt: skip
        assert [row["client"] for row in listed["rows"]] == sorted(last, key=lambda client: (last[client], client))
        assert listed["count"] == 6 and listed["model"] == "personal after" and listed["round"] == 4
        largest = got(server, "/clients?run=fedavg&order=largest")["rows"]
        assert [row["images"] for row in largest] == sorted(map(sum, counts), reverse=True)
        for number in range(6):
            one = got(server, f"/client?run=fedavg&client={number}")
            assert one["counts"] == counts[number] and one["share"] == sum(counts[number]) / sum(map(sum, counts))
            own = [m for m in metrics if m["client"] == number and m["model"] == "personal before"]
            assert one["curves"]["personal before"] == {
                "round": [m["round"] for m in own],
                "accuracy": [m["value"] for m in own],
            }
            rounds = {b["round"] for b in sent if b["client"] == number and b["kind"] == "upload"}
            assert one["took_part"] == len(rounds) and one["last_part"] == max(rounds, default=None)
        assert ask(server, "/client?run=fedavg&client=6")[0] == 400
        assert ask(server, "/client?run=fedavg&client=-1")[0] == 400
        assert b"did you mean 'worst'" in ask(server, "/clients?run=fedavg&order=worse")[2]


def test_weights_and_pictures_that_explain_left(copy):
    from PIL import Image

    (copy / "figures").mkdir()
    (copy / "figures" / "explain-weights.json").write_text('{"used": {"2": 0.25}}')
    Image.new("RGB", (3, 3)).save(copy / "figures" / "explain-clients.png")
    (copy / "figures" / "explain.png").write_text("<script>")
    (copy / "figures" / "run.png").write_bytes(b"")
    with serving(copy.parent) as server:
        one = got(server, "/client?run=fedavg&client=2")
        assert one["weight"] == 0.25 and got(server, "/client?run=fedavg&client=1")["weight"] is None
        assert [picture["name"] for picture in one["pictures"]] == ["explain-clients.png", "explain.png"]
        status, headers, body = ask(server, "/picture?run=fedavg&name=explain-clients.png")
        assert (status, headers["Content-Type"], body[:4]) == (200, "image/png", b"\x89PNG")
        assert ask(server, "/picture?run=fedavg&name=explain.png")[0] == 400
        assert ask(server, "/picture?run=fedavg&name=run.png")[0] == 400


def test_the_report_is_that_of_the_command_and_not_kept(copy):
    with serving(copy.parent) as server:
        _, headers, body = ask(server, "/report?run=fedavg")
    result = json.loads((copy / "result.json").read_text())
    [shown] = embedded(body.decode())["runs"]
    assert shown["curves"]["global"]["accuracy"][-1] == result["accuracy"] and headers["Content-Type"].startswith(
        "text/html"
    )
    assert not [*copy.rglob("*.html")]


def state(path: Path) -> tuple[str, str]:
    seen = follow.Followed(path, "run")
    seen.refresh()
    return seen.row["state"], seen.row["trouble"]


def test_states(copy):
    assert state(copy) == ("done", "")
    with held(copy):
        assert state(copy)[0] == "running"
    (copy / "result.json").unlink()
    killed, why = state(copy)
    assert killed == "failed" and "without a word after round 4 of 4" in why
    for words, expected in (
        ("stopped", ("stopped", "after round 4 of 4")),
        ("failed: no space", ("failed", "no space")),
    ):
        (copy / "log.txt").open("a").write(f"{words}\n")
        assert state(copy) == expected
    (copy / "result.json").write_text('{"rounds": 9}')
    assert state(copy) == ("corrupt", "its tables end after round 4, but result.json says 9")
    (copy / "result.json").write_text("{")
    assert state(copy) == ("corrupt", "result.json is damaged")


@pytest.mark.parametrize("name", ["config.yaml", "passport.json", "metrics.parquet/000001-000004.parquet"])
def test_a_damaged_file_costs_its_run_alone_and_can_be_mended(copy, finished, name):
    whole = (copy / name).read_bytes()
    (copy / name).write_bytes(b"{")
    shutil.copytree(finished, copy.parent / "sound")
    watch = Watch(copy.parent)
    rows = {row["name"]: row for row in watch.since(0)["runs"]}
    assert (
        rows["fedavg"]["state"] == "corrupt" and name in rows["fedavg"]["trouble"] and rows["sound"]["state"] == "done"
    )
    (copy / name).write_bytes(whole)
    os.utime(copy / name.split("/")[0])
    watch._next_refresh = 0
    assert [(row["name"], row["state"]) for row in watch.since(watch.version)["runs"]] == [("fedavg", "done")]


def test_last_words_of_runs(tmp_path):
    """Ctrl-C and a failure are told apart in the log of a real run."""

    class Watching(recorder.Nobody):
        def __init__(self, error: BaseException):
            self.error = error

        def round(self, progress):
            if progress.round == 2:
                raise self.error

    for error, expected in ((KeyboardInterrupt(), "stopped"), (RunFailed("no more\nluck"), "failed")):
        out = tmp_path / expected
        with pytest.raises(type(error)):
            simulate.run(config.read(None, [*SMALL, f"out={out}"]), watcher=Watching(error))
        assert state(out) == (expected, "after round 2 of 4" if expected == "stopped" else "no more luck")


@pytest.mark.parametrize("checkpoint", [1, 0])
def test_a_stop_is_noticed_after_the_round_and_resumed_to_the_same_bits(finished, tmp_path, checkpoint):
    out = tmp_path / "run"

    class Asking(recorder.Nobody):
        def round(self, progress):
            if progress.round == 1:
                (out / "stop").touch()

    with pytest.raises(recorder.Stopped, match="stopped after round 2 of 4, as asked"):
        simulate.run(config.read(None, [*SMALL, f"out={out}", f"checkpoint={checkpoint}"]), watcher=Asking())
    assert state(out) == ("stopped", "after round 2 of 4") and not (out / "stop").exists()
    checkpoint_kept, _ = RunFolder(out).load()
    assert checkpoint_kept is not None and checkpoint_kept.round == 2  # nothing is lost, whatever `checkpoint` says
    (out / "stop").touch()  # left behind by a process that was killed
    resume(out)
    assert state(out) == ("done", "") and not (out / "stop").exists() and [*differences(finished, out)] == []


def test_a_stop_in_the_last_round_changes_nothing(tmp_path):
    out = tmp_path / "run"

    class Asking(recorder.Nobody):
        def round(self, progress):
            if progress.round == 3:
                (out / "stop").touch()

    simulate.run(config.read(None, [*SMALL, f"out={out}"]), watcher=Asking())
    assert state(out) == ("done", "") and not (out / "stop").exists()


# ---- reading on ------------------------------------------------------------------------------------------------------
@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """Names of the parts that the page opened."""
    opened: list[str] = []

    def counted(part, schema):
        opened.append(part.name)
        return tables.read_part(part, schema)

    own = SimpleNamespace(**{**vars(tables), "read_part": counted})  # a run's own reads do not count
    monkeypatch.setattr(follow, "tables", own)
    return opened


def six(value: float) -> float:
    """As pages are sent it."""
    return float(f"{value:.6g}")


def whole(path: Path) -> dict:
    """All of it at once, by another way."""
    rows = [
        m for m in pq.read_table(path / "metrics.parquet").to_pylist() if m["model"] == "global" and m["client"] is None
    ]
    return {name: [six(m["value"]) for m in rows if m["metric"] == name] for name in ("accuracy", "loss")}


def test_only_what_is_new_is_read(tmp_path, reads):
    path = synthetic(tmp_path / "run", 10, done=False)
    seen = follow.Followed(path, "run")
    assert seen.refresh() and reads == ["000001-000010.parquet"]
    for end in range(11, 31):
        grow(path, end - 1, end, 100)
        assert seen.refresh() and not seen.refresh()
        assert reads[-1] == f"{end:06d}-{end:06d}.parquet"
        news = seen.curves(end - 1, seen.generation)
        assert news["curves"]["global"]["round"] == [end]
    assert len(reads) == 21, "a part was read twice"
    everything = seen.curves(0, 0)["curves"]["global"]
    assert {name: everything[name] for name in ("accuracy", "loss")} == whole(path)
    assert np.allclose(everything["seconds"], 0.5 * np.arange(1, 31))


def test_parts_that_are_merged_are_not_read_again(tmp_path, reads):
    path = synthetic(tmp_path / "run", 3, done=False)
    seen = follow.Followed(path, "run")
    for end in range(4, 80):
        grow(path, end - 1, end, 100)
        seen.refresh()
    assert len([*(path / "metrics.parquet").iterdir()]) < 64  # they were merged on the way
    large = [name for name in reads if int(name[7:13]) - int(name[:6]) > 3]
    assert len(large) <= 1 and len(reads) <= 78
    everything = seen.curves(0, 0)["curves"]["global"]
    assert {name: everything[name] for name in ("accuracy", "loss")} == whole(path)
    RunFolder(path).tables()[0].merge()
    before = len(reads)
    seen.refresh()
    assert len(reads) == before


def test_between_checkpoints_the_log_is_followed(tmp_path):
    path = synthetic(tmp_path / "run", 4, done=False)
    seen = follow.Followed(path, "run")
    seen.refresh()
    with open(path / "log.txt", "a") as log:
        log.write("round 5/10  accuracy 0.9876  loss 0.1234  up 5.0 MB  down 5.0 MB  9.0 s\nround 6/10  accu")
    assert seen.refresh() and seen.row["round"] == 5 and seen.row["accuracy"] == 0.9876
    assert seen.curves(4, 0 + seen.generation)["curves"]["global"] == {
        "round": [5], "accuracy": [0.9876], "loss": [0.1234], "seconds": [9.0], "bytes": [None]}  # fmt: skip
    assert seen.curves(4, seen.generation, spent=True)["curves"]["global"]["bytes"] == [10e6]
    with open(path / "log.txt", "a") as log:
        log.write("racy 99.00 %  loss 0.1000  up 6.0 MB  down 6.0 MB  11.0 s\n")
    assert seen.refresh() and seen.row["round"] == 6 and seen.row["accuracy"] == 0.99


def test_rounds_without_an_evaluation_are_not_drawn(tmp_path):
    path = synthetic(tmp_path / "run", 2, done=False)
    text = (path / "config.yaml").read_text()
    (path / "config.yaml").write_text(text.replace("  every: 1\n", "  every: 2\n"))
    assert (path / "config.yaml").read_text() != text
    with open(path / "log.txt", "a") as log:
        for number, value in ((3, 0.5), (4, 0.6), (5, 0.6)):  # a line repeats the newest accuracy
            log.write(f"round {number}/9  accuracy {value:.4f}  loss 1.0000  up 5.0 MB  down 5.0 MB  9.0 s\n")
    seen = follow.Followed(path, "run")
    seen.refresh()
    assert seen.curves(0, 0)["curves"]["global"]["round"] == [1, 2, 4] and seen.row["round"] == 5


def test_a_run_that_goes_on_from_an_earlier_checkpoint(tmp_path):
    path = synthetic(tmp_path / "run", 6, done=False)
    seen = follow.Followed(path, "run")
    seen.refresh()
    before = seen.curves(0, 0)
    for table in RunFolder(path).tables():
        table.cut(4)
    grow(path, 4, 7, 100, seed=9)  # other numbers, so that stale ones would show
    seen.refresh()
    after = seen.curves(before["read"], before["generation"])
    assert after["generation"] != before["generation"] and after["after"] == 0
    assert after["curves"]["global"]["round"] == [1, 2, 3, 4, 5, 6, 7]
    assert {name: after["curves"]["global"][name] for name in ("accuracy", "loss")} == whole(path)


def test_runs_come_and_go(copy, finished):
    watch = Watch(copy.parent)
    first = watch.since(0)
    assert [row["name"] for row in first["runs"]] == ["fedavg"]
    assert watch.since(first["version"])["runs"] == []
    shutil.copytree(finished, copy.parent / "deep" / "er")
    shutil.rmtree(copy)
    watch._next_refresh = watch._next_search = 0
    news = watch.since(first["version"])
    assert [row["name"] for row in news["runs"]] == ["deep/er"] and news["gone"] == ["fedavg"]
    shutil.rmtree(copy.parent / "deep")
    watch._next_refresh = watch._next_search = 0
    assert watch.since(news["version"]) == {
        "version": news["version"] + 1,
        "runs": [],
        "gone": ["deep/er"],
        "more": False,
    }


def test_events_tell_what_changes(tmp_path):
    path = synthetic(tmp_path / "runs" / "a", 3, done=False)
    synthetic(tmp_path / "runs" / "b", 3)
    with serving(path.parent) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
        connection.request("GET", "/events")
        stream = connection.getresponse()
        assert stream.headers["Content-Type"].startswith("text/event-stream")

        def news() -> dict:
            line = stream.readline()
            assert line.startswith(b"data: ") and stream.readline() == b"\n"
            return json.loads(line[6:])

        first = news()
        assert first["all"] and sorted(row["name"] for row in first["runs"]) == ["a", "b"]
        grow(path, 3, 4, 10)
        second = news()
        assert not second["all"] and [(row["name"], row["round"]) for row in second["runs"]] == [("a", 4)]
        connection.close()


# ---- size ------------------------------------------------------------------------------------------------------------
def test_fifty_runs_of_a_thousand_rounds_cost_little(tmp_path):
    """All of them grow by a round a second: what a look takes, and what a page is sent."""
    original = synthetic(tmp_path / "run-00", 1000, done=False)
    paths = [original, *(Path(shutil.copytree(original, tmp_path / f"run-{number:02d}")) for number in range(1, 50))]
    watch = Watch(tmp_path)
    began = time.process_time()
    while watch.since(0)["more"]:  # a page is told of some at once
        pass
    opening, first = time.process_time() - began, watch.since(0)
    assert len(first["runs"]) == 50 and len(json.dumps(first)) < 100_000
    took = []
    for end in range(1001, 1006):
        for path in paths:
            grow(path, end - 1, end, 2000)
        watch._next_refresh = 0
        began = time.process_time()
        news = watch.since(watch.version)
        took.append(time.process_time() - began)
        assert [row["round"] for row in news["runs"]] == [end] * 50
        assert len(json.dumps(watch.curves({"run-07": (end - 1, 1)}))) < 500
    watch._next_refresh = 0
    began = time.process_time()
    assert watch.since(watch.version)["runs"] == []
    idle = time.process_time() - began
    print(f"opening {opening:.3f} s, a look at 50 growing runs {min(took):.3f} s, at 50 idle ones {idle:.4f} s")
    assert opening < 5 and min(took) < 0.5


def test_ten_thousand_clients_are_sent_by_the_page(tmp_path):
    synthetic(tmp_path / "runs" / "many", 20, clients=10_000, looks=4)
    with serving(tmp_path / "runs") as server:
        assert len(json.dumps(server.watch.since(0))) < 2_000
        _, _, body = ask(server, "/clients?run=many&order=worst&at=9980")
        found = json.loads(body)
        assert len(body) < 4_000 and found["count"] == 10_000 and len(found["rows"]) == 20
        values = [row["accuracy"] for row in found["rows"]]
        assert values == sorted(values) and values[0] > 0.99
        began = time.perf_counter()
        one = got(server, "/client?run=many&client=9999")
        print(f"one client of 10,000: {time.perf_counter() - began:.3f} s")
        assert one["curves"]["personal after"]["round"] == [4, 8, 12, 16, 20] and len(json.dumps(one)) < 1_000
        assert clients.PAGE == 25


def test_of_very_many_runs_the_first_come_soon(finished, tmp_path, monkeypatch):
    for number in range(5):
        shutil.copytree(finished, tmp_path / "runs" / str(number))
    monkeypatch.setattr("fedlens.ui.watch._PATIENCE", 1e-9)  # there is time for one
    watch, told, version = Watch(tmp_path / "runs"), [], 0
    assert watch.run("2").row["state"] == "done"  # whoever asks for one gets it
    for left in (2, 1, 0):
        news = watch.since(version)
        told += [row["name"] for row in news["runs"]]
        assert news["more"] == (left > 0) and len(told) == 5 - left
        version = news["version"]
    assert sorted(told) == ["0", "1", "2", "3", "4"]
