"""``ncclops export-traces``: what a collector gets, a real HTTP server that decodes it."""

from __future__ import annotations

import gc
import gzip
import json
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from typing import Any
from unittest import mock

import pytest

from tests.conftest import CompletedText, free_port

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from ncclops.moments import LATEST_S
from ncclops.redaction.marks import mark_of
from ncclops.traces.otlp import send
from ncclops.traces.reading import read

LIMIT_S = 30.0
RUN_ID = "20260101-120000-abc123"
Export = Callable[..., CompletedText]


@dataclass
class Request:
    path: str
    headers: dict[str, str]
    body: ExportTraceServiceRequest

    @property
    def spans(self) -> list[Span]:
        (of_resource,) = self.body.resource_spans
        (of_scope,) = of_resource.scope_spans
        return list(of_scope.spans)

    @property
    def resource(self) -> dict[str, Any]:
        return values(self.body.resource_spans[0].resource.attributes)


@dataclass
class Collector:
    """Answers with ``codes``, one after the other, else with 200."""

    port: int = 0
    got: Queue[Request] = field(default_factory=Queue)
    codes: list[int] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def next(self) -> Request:
        return self.got.get(timeout=LIMIT_S)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    state = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            if headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            request = ExportTraceServiceRequest.FromString(body)
            state.got.put(Request(self.path, headers, request))
            self.send_response(state.codes.pop(0) if state.codes else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, args=[0.02], daemon=True)
    thread.start()
    yield state
    server.shutdown()
    server.server_close()
    thread.join(LIMIT_S)


def values(pairs: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        if kind == "array_value":
            return [plain(each) for each in value.array_value.values]
        return getattr(value, kind)

    return {pair.key: plain(pair.value) for pair in pairs}


def event(name: str, ts: float, rank: int | None = None, /, **fields: Any) -> dict[str, Any]:
    return {"ts": ts, "event": name, "rank": rank, "node": "n01", **fields}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of two ranks with a restart in place, which has failed then."""
    run = tmp_path / "run"
    write(run, *EVENTS)
    (run / "ranks/0").mkdir(parents=True)
    environment = {
        "schema": "ncclops.env-snapshot/1",
        "label": "rank 0",
        "variables": {"STORE_PASSWORD": "<redacted>"},
        "marks": [mark_of("correct.horse")],
    }
    (run / "ranks/0/environment.json").write_text(json.dumps(environment))
    (run / "run.json").write_text(
        json.dumps(
            {
                "schema": "ncclops.run/1",
                "run_id": RUN_ID,
                "profile": {"name": "local-cpu"},
                "command": ["python", "train.py", "--lr", "1"],
            }
        )
    )
    return run


EVENTS = [
    event("run-started", 1000.0, run_id=RUN_ID, world_size=2),
    event("worker-started", 1001.0, 0, pid=1),
    event("bootstrapped", 1005.0, 0),
    event("step", 1010.0, 0, step=1, step_s=1.0),
    event("step", 1019.0, 0, step=10, step_s=1.0),
    event("fault", 1020.0, 1, cause="RuntimeError: refused, token=abc123def to correct.horse"),
    event(
        "restart", 1022.0, iteration=1, faulty_ranks=[1], phases_ms={"detect": 500, "abort": 1500}
    ),
    event("step", 1024.0, 0, step=11, step_s=1.0),
    event("worker-exited", 1030.0, 1, exit_code=1),
    event("verdict", 1031.0, outcome="failed", exit_code=1, reason="rank 1 exited with 1"),
]


def write(run: Path, *events: dict[str, Any]) -> None:
    run.mkdir(exist_ok=True)
    (run / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))


def test_a_collector_gets_the_run_as_one_trace(
    ncclops_in_process: Export, collector: Collector, run_dir: Path
) -> None:
    done = ncclops_in_process("export-traces", run_dir, "--endpoint", collector.url)
    assert (done.returncode, done.stderr) == (0, "")
    request = collector.next()
    assert request.path == "/v1/traces"
    assert request.headers["content-type"] == "application/x-protobuf"
    assert request.resource["service.name"] == "ncclops"
    assert request.resource["host.name"] == "n01"
    spans = {span.name: span for span in request.spans}
    root = spans["run"]
    assert f"trace {root.trace_id.hex()} of run {RUN_ID}" in done.stdout
    assert f"{len(request.spans)} spans sent" in done.stdout
    assert {span.trace_id for span in request.spans} == {root.trace_id}
    assert root.parent_span_id == b""
    assert (root.start_time_unix_nano, root.end_time_unix_nano) == (1000 * 10**9, 1031 * 10**9)
    assert (root.status.code, root.status.message) == (
        Status.STATUS_CODE_ERROR,
        "rank 1 exited with 1",
    )
    known = values(root.attributes)
    assert known["ncclops.profile"] == "local-cpu"
    assert known["ncclops.world_size"] == 2
    assert known["ncclops.command"] == ["python", "train.py", "--lr", "1"]
    assert {spans[name].parent_span_id for name in ("start-up", "restart", "end")} == {root.span_id}
    assert {spans[name].parent_span_id for name in ("detect", "abort")} == {
        spans["restart"].span_id
    }
    assert spans["abort"].end_time_unix_nano == 1022 * 10**9
    (fault,) = spans["restart"].events
    assert (fault.name, fault.time_unix_nano) == ("fault", 1020 * 10**9)
    assert values(fault.attributes)["ncclops.rank"] == 1


def test_secrets_stay_here(ncclops_in_process: Export, collector: Collector, run_dir: Path) -> None:
    assert ncclops_in_process("export-traces", run_dir, "--endpoint", collector.url).returncode == 0
    sent = collector.next().body.SerializeToString()
    assert b"RuntimeError: refused" in sent
    assert b"abc123def" not in sent
    assert b"correct.horse" not in sent, "the value of a rank's variable with such a name"


def test_the_usual_variables_say_where_and_how(
    ncclops_in_process: Export, collector: Collector, run_dir: Path
) -> None:
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"{collector.url}/base/",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20tok",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
        "OTEL_SERVICE_NAME": "pretraining",
        "OTEL_RESOURCE_ATTRIBUTES": "team=nlp,host.name=other",
    }
    assert ncclops_in_process("export-traces", run_dir, env=environ).returncode == 0
    request = collector.next()
    assert request.path == "/base/v1/traces"
    assert request.headers["authorization"] == "Bearer tok"
    assert request.headers["content-encoding"] == "gzip"
    resource = request.resource
    assert (resource["service.name"], resource["team"], resource["host.name"]) == (
        "pretraining",
        "nlp",
        "other",
    )


def test_a_run_that_is_sent_again_is_the_same_trace(collector: Collector, run_dir: Path) -> None:
    for _ in range(2):
        send(read(run_dir), f"{collector.url}/v1/traces")
    first, second = collector.next(), collector.next()
    assert first.body == second.body
    assert first.path == "/v1/traces"


def test_a_long_run_is_sent_in_parts_and_loses_no_event(
    collector: Collector, run_dir: Path
) -> None:
    restarts = [
        event("restart", 1022.0 + n, iteration=n, phases_ms={"detect": 100, "abort": 200})
        for n in range(400)
    ]
    faults = [event("fault", 1019.5, rank, cause="x") for rank in range(300)]
    write(run_dir, *EVENTS[:5], *faults, *restarts)
    trace = read(run_dir)
    assert len(trace.spans) > 1000
    assert send(trace, collector.url) == len(trace.spans)
    spans: list[Span] = []
    while len(spans) < len(trace.spans):
        spans += collector.next().spans
    assert len({span.span_id for span in spans}) == len(trace.spans)
    assert sum(len(span.events) for span in spans) == 700
    assert sum(span.dropped_events_count for span in spans) == 0


def test_times_and_numbers_of_any_size_can_be_sent(collector: Collector, run_dir: Path) -> None:
    far = event("fault", LATEST_S, 2**62, cause="\x00\U0001f600", attempt=2**80)
    write(run_dir, *EVENTS[:5], far)
    send(read(run_dir), collector.url)
    assert any(each.events for each in collector.next().spans)


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        *((307, "name its port"), (400, "name its port"), (404, "name its port")),
        *((401, "give its token in OTEL_EXPORTER_OTLP_HEADERS"), (500, "its own log says why")),
    ],
)
def test_a_refusal_is_one_line(
    ncclops_in_process: Export, collector: Collector, run_dir: Path, code: int, advice: str
) -> None:
    collector.codes = [code]
    done = ncclops_in_process("export-traces", run_dir, "--endpoint", collector.url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert "ncclops: error: the collector has not taken the trace" in done.stderr
    assert f"127.0.0.1:{collector.port} answers {code}" in done.stderr
    assert advice in done.stderr


def test_a_collector_that_is_not_there_is_one_line(
    ncclops_in_process: Export, collector: Collector, run_dir: Path
) -> None:
    environ = {"OTEL_EXPORTER_OTLP_TIMEOUT": "0.2", "NO_PROXY": "127.0.0.1"}
    port = free_port()
    url = f"http://me:word@127.0.0.1:{port}"
    done = ncclops_in_process("export-traces", run_dir, "--endpoint", url, env=environ)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert f"taken the trace: 127.0.0.1:{port}: Connection refused: name its port" in done.stderr


@contextmanager
def answering(*pieces: bytes) -> Iterator[str]:
    """A collector that sends the last of ``pieces`` again and again: its URL."""
    *first, last = pieces

    def serve() -> None:
        client, _ = listener.accept()
        with client, suppress(OSError):
            client.recv(1 << 16)
            client.sendall(b"".join(first))
            while not over.wait(0.02):
                client.sendall(last)

    over, listener = threading.Event(), socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    over.set()
    thread.join(LIMIT_S)
    listener.close()


@pytest.mark.parametrize(
    ("pieces", "code", "expected"),
    [
        ((b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 65536), 0, "spans sent: trace"),
        ((b"HTTP/1.1 200 OK\r\nA: ", b"x"), 1, "no whole answer in time: name its port"),
    ],
    ids=["endless body", "endless head"],
)
def test_an_answer_without_an_end_is_not_waited_for(
    ncclops_in_process: Export,
    run_dir: Path,
    pieces: tuple[bytes, ...],
    code: int,
    expected: str,
) -> None:
    environ = {"OTEL_EXPORTER_OTLP_TIMEOUT": "0.5", "NO_PROXY": "127.0.0.1"}
    with answering(*pieces) as url:
        done = ncclops_in_process("export-traces", run_dir, "--endpoint", url, env=environ)
    assert done.returncode == code, done.stderr
    assert expected in done.stdout + done.stderr
    # The request that was not waited for has a connection, which stays open in a process that goes
    # on: it is collected here, and in no later test.
    for thread in threading.enumerate():
        if thread.name == "ncclops-files":
            thread.join(LIMIT_S)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        (["--endpoint", "collector:4318"], {}, "--endpoint is no URL"),
        (["--endpoint", "http://"], {}, "--endpoint is no URL"),
        (["--endpoint", "http://a:b"], {}, "--endpoint is no URL"),
        ([], {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "only http/protobuf"),
        ([], {"OTEL_SDK_DISABLED": "true"}, "OTEL_SDK_DISABLED=true"),
        ([], {"OTEL_EXPORTER_OTLP_ENDPOINT": "s3cret:4318"}, "OTEL_EXPORTER_OTLP_ENDPOINT is no"),
        ([], {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "file:///s3cret"}, "TRACES_ENDPOINT is no URL"),
        ([], {"OTEL_SPAN_EVENT_COUNT_LIMIT": "many"}, "OTEL_SPAN_EVENT_COUNT_LIMIT"),
    ],
)
def test_settings_that_cannot_be_followed_are_one_line(
    ncclops_in_process: Export,
    run_dir: Path,
    arguments: list[str],
    environ: dict[str, str],
    expected: str,
) -> None:
    done = ncclops_in_process("export-traces", run_dir, *arguments, env=environ)
    assert (done.returncode in (1, 2), done.stdout, done.stderr.count("\n")) == (True, "", 1)
    assert expected in done.stderr
    assert "s3cret" not in done.stderr


def test_a_run_that_has_not_begun_is_one_line(ncclops_in_process: Export, run_dir: Path) -> None:
    write(run_dir, EVENTS[0])
    done = ncclops_in_process("export-traces", run_dir)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "shows nothing that took time" in done.stderr


@pytest.mark.parametrize(
    "missing", ["opentelemetry.exporter.otlp.proto.http.trace_exporter", "requests"]
)
def test_without_the_extra_the_line_says_how_to_get_it(
    ncclops_in_process: Export, run_dir: Path, missing: str
) -> None:
    with mock.patch.dict(sys.modules, {missing: None}):
        del sys.modules["ncclops.traces.otlp"]
        done = ncclops_in_process("export-traces", run_dir)
    assert done.returncode == 2
    assert "pip install 'ncclops[otel]'" in done.stderr
