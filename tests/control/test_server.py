"""The control plane over HTTP: what can be read, who may change what, what ends with whom."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from http.client import HTTPConnection
from pathlib import Path

import psutil
import pytest

from ncclops.host import process_tree
from ncclops.host.kept_running import KeptRunning
from ncclops.record import control_address
from ncclops.record.paths import RunPaths
from tests.conftest import LIMIT_S
from tests.control.conftest import Agent, event, write_events

Start = Callable[..., Agent]


def test_reading_needs_no_token(shared: Agent) -> None:
    response, body = shared.request("GET", "/status")
    document = json.loads(body)
    assert response.status == 200
    assert (document["schema"], document["source"]) == ("ncclops.status/1", "agent")
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]
    response, body = shared.request("GET", "/metrics")
    assert response.getheader("Content-Type", "").startswith("text/plain; version=0.0.4")
    assert b'ncclops_run_info{profile="local-cpu",run_id="a-run"} 1.0' in body
    response, body = shared.request("GET", "/healthz")
    assert (response.status, json.loads(body)) == (200, {"ok": True})


def test_curl_reads_status_and_metrics(shared: Agent) -> None:
    ask = ["curl", "-sS", "--fail", "--unix-socket", str(shared.run / "control/http.sock")]
    for path, expected in (("/status", "ncclops.status/1"), ("/metrics", "ncclops_restarts_total")):
        curl = subprocess.run(
            [*ask, f"http://localhost{path}"],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert expected in curl.stdout, curl.stderr


def test_a_head_request_gets_the_head_alone(shared: Agent) -> None:
    response, body = shared.request("HEAD", "/status")
    assert response.status == 200
    assert int(response.getheader("Content-Length", "0")) > 100
    assert body == b""


def test_what_changes_in_the_run_is_seen(agent: Agent) -> None:
    def phase() -> str:
        return str(json.loads(agent.request("GET", "/status")[1])["phase"])

    assert phase() == "starting"
    write_events(agent.run, [event("bootstrapped", 0.0, rank) for rank in (0, 1)])
    deadline = _deadline()
    while phase() != "running":  # a status is kept for half a second
        deadline()


@pytest.mark.parametrize(
    ("action", "noted"),
    [
        ({"action": "stop"}, ("stop", "no reason given", "unknown")),
        ({"action": "stop", "reason": "enough", "by": "me"}, ("stop", "enough", "me")),
        ({"action": "restart", "by": "me"}, ("restart", "no reason given", "me")),
        (
            {"action": "tighten-timeouts", "timeouts": {"soft": "90s", "hard": "2m"}},
            (
                "tighten",
                {"soft": timedelta(seconds=90), "hard": timedelta(minutes=2)},
                "no reason given",
                "unknown",
            ),
        ),
    ],
)
def test_a_change_reaches_the_agent(
    shared: Agent, action: dict[str, object], noted: tuple[object, ...]
) -> None:
    code, answer = shared.command(action)
    assert (code, answer["action"]) == (202, action["action"])
    assert answer["message"] == f"{noted[0]} noted"
    assert shared.asked.calls == [noted]


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, 401),
        ({"Authorization": "Bearer"}, 403),
        ({"Authorization": "Bearer wrong"}, 403),
        ({"Authorization": "Bearer \xff\xfe"}, 403),
        ({"Authorization": "Basic {token}"}, 403),
        ({"Authorization": "{token}"}, 403),
        ({"Authorization": "Bearer {token}x"}, 403),
        ({"Authorization": "Bearer {token} {token}"}, 403),
    ],
)
@pytest.mark.parametrize("action", ["stop", "restart", "tighten-timeouts", "nonsense"])
def test_no_token_no_change(shared: Agent, action: str, headers: dict[str, str], code: int) -> None:
    filled_in = {name: value.replace("{token}", shared.token) for name, value in headers.items()}
    body = json.dumps({"action": action, "timeouts": {"soft": "1s"}})
    response, answer = shared.request("POST", "/control", body, filled_in)
    assert response.status == code
    assert "token" in json.loads(answer)["error"]
    assert (response.getheader("WWW-Authenticate") is not None) == (code == 401)
    assert shared.asked.calls == []


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_a_change_is_a_post(shared: Agent, method: str) -> None:
    headers = {"Authorization": f"Bearer {shared.token}"}
    response, _ = shared.request(method, "/control", '{"action": "stop"}', headers)
    assert (response.status, response.getheader("Allow")) == (405, "POST")
    assert shared.asked.calls == []


@pytest.mark.parametrize("path", ["/status", "/metrics", "/healthz"])
def test_what_is_read_cannot_be_written(shared: Agent, path: str) -> None:
    headers = {"Authorization": f"Bearer {shared.token}"}
    assert shared.request("POST", path, '{"action": "stop"}', headers)[0].status == 405


@pytest.mark.parametrize("path", ["/", "/stop", "/status/", "//control", "/control/../status", "*"])
def test_other_paths_are_not_there(shared: Agent, path: str) -> None:
    response, answer = shared.request("GET", path)
    assert response.status == 404
    assert "/status" in json.loads(answer)["error"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("", "JSON"),
        ("{", "JSON"),
        ("[]", "an object"),
        ("null", "an object"),
        ("{}", "action is missing; known: stop, restart, tighten-timeouts"),
        ('{"action": "launch"}', "action: no 'launch'; known: stop, restart, tighten-timeouts"),
        ('{"action": "stpo"}', "action: no 'stpo'; did you mean stop?"),
        ('{"action": "stop", "graec": "5s"}', "graec: unknown key; did you mean grace?"),
        ('{"action": ["stop"]}', "action"),
        ('{"action": "stop", "force": true}', "force"),
        ('{"action": "stop", "reason": 5}', "reason"),
        (json.dumps({"action": "stop", "reason": "x" * 401}), "reason"),
        ('{"action": "tighten-timeouts"}', "timeouts"),
        ('{"action": "tighten-timeouts", "timeouts": {}}', "timeouts"),
        ('{"action": "tighten-timeouts", "timeouts": {"soft": "90"}}', "90s or 2h"),
        ('{"action": "tighten-timeouts", "timeouts": {"soft": "0s"}}', "at once"),
        ('{"action": "tighten-timeouts", "timeouts": {"soft": "9e9d"}}', "duration"),
        (f'{{"action": "tighten-timeouts", "timeouts": {{"soft": "{"9" * 30}d"}}}}', "longer than"),
        ('{"action": "tighten-timeouts", "timeouts": {"completion": "1s"}}', "completion"),
        ("[" * 20000, ""),
        ('{"action": "stop", "reason": "\\ud800"}', ""),
    ],
)
def test_a_command_that_is_none_is_refused_with_its_fault(
    shared: Agent, body: str, says: str
) -> None:
    code, answer = shared.command(body)
    assert code == 400
    assert says in answer["error"]
    assert "\n" not in answer["error"]
    assert shared.asked.calls == []


def test_what_goes_into_the_record_is_one_plain_line(shared: Agent) -> None:
    shared.command({"action": "stop", "reason": "too\nslow\x1b[31m\x00", "by": " a \t b "})
    assert shared.asked.calls == [("stop", r"too slow\x00", "a b")]


def test_an_agent_that_refuses_says_why(shared: Agent) -> None:
    shared.asked.refuse("nothing runs any more")
    assert shared.command({"action": "restart"}) == (409, {"error": "nothing runs any more"})


def test_a_command_that_fails_does_not_end_the_agent(shared: Agent) -> None:
    shared.asked.fails_with = RuntimeError("a defect")
    code, answer = shared.command({"action": "stop"})
    assert code == 409
    assert "a defect" in answer["error"]
    assert any("a defect" in line for line in shared.said)
    shared.asked.fails_with = None
    assert shared.command({"action": "stop"})[0] == 202


def test_the_token_is_for_its_owner_and_new_for_each_run(
    start_agent: Start, tmp_path: Path
) -> None:
    first, second = start_agent(tmp_path / "a"), start_agent(tmp_path / "b")
    for agent in (first, second):
        token, path = RunPaths(agent.run).token, RunPaths(agent.run).socket
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert first.token != second.token
    assert first.command({"action": "stop"}, second.token)[0] == 403


def test_a_run_directory_may_have_a_long_name(start_agent: Start, tmp_path: Path) -> None:
    long = tmp_path / ("d" * 120) / ("e" * 120)
    agent = start_agent(long)
    assert agent.request("GET", "/healthz")[0].status == 200


def test_where_the_file_system_takes_no_sockets_a_link_leads_to_one(
    start_agent: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind = control_address._bind

    def refuse_there(path: Path) -> object:
        if path.is_relative_to(tmp_path):
            raise OSError(95, "Operation not supported")
        return bind(path)

    monkeypatch.setattr(control_address, "_bind", refuse_there)
    agent = start_agent()
    path = RunPaths(agent.run).socket
    target = path.readlink()
    assert agent.request("GET", "/healthz")[0].status == 200
    agent.close()
    assert not target.exists()
    assert not path.is_symlink()


def test_over_tcp_it_listens_on_loopback(start_agent: Start) -> None:
    agent = start_agent(tcp=True)
    url = f"http://127.0.0.1:{agent.tcp_port}"
    with urllib.request.urlopen(f"{url}/metrics", timeout=LIMIT_S) as response:
        assert b"ncclops_run_phase" in response.read()
    change = urllib.request.Request(f"{url}/control", b'{"action": "stop"}')
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(change, timeout=LIMIT_S)
    change.add_header("Authorization", f"Bearer {agent.token}")
    with urllib.request.urlopen(change, timeout=LIMIT_S) as response:
        assert response.status == 202


@pytest.mark.parametrize("tokens", [False, True])
def test_who_comes_over_the_network_calls_it_by_its_name(start_agent: Start, tokens: bool) -> None:
    """A web page that has its own name resolved to 127.0.0.1 reads nothing."""
    agent = start_agent(tcp=True, token_for_reads=tokens)

    def status(host: str, path: str = "/status", token: str | None = agent.token) -> int:
        headers = {"Host": host} | ({} if token is None else {"Authorization": f"Bearer {token}"})
        with closing(HTTPConnection("127.0.0.1", agent.tcp_port, timeout=LIMIT_S)) as connection:
            connection.request("GET", path, headers=headers)
            return connection.getresponse().status

    assert status("evil.example.com") == status(f"evil.example.com:{agent.tcp_port}") == 421
    assert status("localhost:80.evil.example.com") == status("[::1]evil.example.com") == 421
    assert {status(host) for host in ("localhost", "LOCALHOST:1", "127.0.0.1:80", "[::1]:80")} == {
        200
    }
    assert status("localhost", token=None) == (401 if tokens else 200)
    assert status("localhost", "/metrics", token="wrong") == (403 if tokens else 200)
    assert status("localhost", "/healthz", token=None) == 200
    assert agent.request("GET", "/status", headers={"Host": "anything"})[0].status == 200


def test_with_the_agent_the_server_goes(agent: Agent) -> None:
    agent.request("GET", "/healthz")
    (pid,) = agent.server.pids
    agent.close()
    assert not psutil.pid_exists(pid)
    assert not RunPaths(agent.run).socket.exists()
    assert not RunPaths(agent.run).token.exists()
    assert agent.said == []


def test_a_server_that_something_has_stopped_goes_on(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KeptRunning, "PAUSE_S", 0.1)
    agent.request("GET", "/healthz")
    (pid,) = agent.server.pids
    os.kill(pid, signal.SIGSTOP)
    assert agent.command({"action": "stop"})[0] == 202
    assert agent.server.pids == {pid}


def test_a_server_that_was_killed_is_replaced(agent: Agent) -> None:
    agent.request("GET", "/healthz")
    (pid,) = agent.server.pids
    os.kill(pid, 9)
    # The socket is the agent's, so no client is refused in between.
    assert agent.request("GET", "/healthz")[0].status == 200
    assert agent.server.pids != {pid}
    assert agent.command({"action": "stop"})[0] == 202


def test_a_server_that_keeps_ending_is_not_restarted_and_that_is_reported(agent: Agent) -> None:
    agent.request("GET", "/healthz")
    seen: set[int] = set()
    deadline = _deadline()
    while not agent.said:
        for pid in agent.server.pids - seen:
            seen.add(pid)
            os.kill(pid, 9)
        deadline()
    assert "ended 5 times" in agent.said[0]
    assert "server.log" in agent.said[0]


def test_where_the_run_directory_was_moved_away_before_it_starts_clients_are_refused(
    agent: Agent,
) -> None:
    """They do not wait at a socket that nobody serves."""
    moved = agent.run.rename(agent.run.with_name("moved"))
    with control_address.connect_unix(moved, LIMIT_S) as client:
        try:
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(100) == b""
        except ConnectionError:
            pass  # reset, or closed before it was written
    assert agent.said
    with pytest.raises(OSError):
        control_address.connect_unix(moved, LIMIT_S)


def test_the_server_is_spared_when_leftovers_are_ended(agent: Agent, one_agent: Agent) -> None:
    agent.request("GET", "/healthz")
    leftover = subprocess.Popen(["sleep", "600"])
    spared = agent.server.pids | one_agent.server.pids
    assert process_tree.end_descendants(timedelta(0), {leftover.pid}, spared=spared) == []
    assert leftover.wait(LIMIT_S) != 0
    assert agent.request("GET", "/healthz")[0].status == 200


def test_status_over_a_directory_that_has_gone_is_an_answer(agent: Agent) -> None:
    (agent.run / "events.jsonl").unlink()
    response, answer = agent.request("GET", "/status")
    assert response.status == 503
    assert "cannot be read" in json.loads(answer)["error"]
    assert agent.command({"action": "stop"})[0] == 202


@pytest.mark.timeout(6 * LIMIT_S)  # seconds; the server yields to whatever else runs here
def test_a_thousand_requests_of_a_hundred_clients_are_answered(shared: Agent) -> None:
    """And what they cost the job is measured by scripts/bench_control.py."""

    async def one_client(requests: int) -> int:
        reader, writer = await asyncio.open_connection(sock=shared.connect())
        good = 0
        for number in range(requests):
            path = b"/metrics" if number % 2 else b"/status"
            writer.write(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.split(b"\r\n") if b"Content-Length" in line)
            await reader.readexactly(int(length.split(b":")[1]))
            good += head.startswith(b"HTTP/1.1 200 ")
        writer.close()
        return good

    async def all_clients() -> int:
        return sum(await asyncio.gather(*(one_client(10) for _ in range(100))))

    assert asyncio.run(asyncio.wait_for(all_clients(), 5 * LIMIT_S)) == 1000
    assert shared.asked.calls == []


def _deadline() -> Callable[[], None]:
    """A function to call in a loop that waits for what has no event; fails when it takes long."""
    end = time.monotonic() + LIMIT_S

    def check() -> None:
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)

    return check
