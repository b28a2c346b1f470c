"""Sends a trace by OTLP over HTTP, with OpenTelemetry's SDK: the extra ``otel``."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import HOST_NAME, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Status, StatusCode, set_span_in_context

from ncclops._version import __version__
from ncclops.errors import NcclopsError, UsageError
from ncclops.record.answer import Answer
from ncclops.traces.model import Trace

_PATH = "/v1/traces"
_AT_ONCE = 500  # spans in a request: a collector takes a few MiB
_REQUEST_LIMIT_S = 10.0  # where the exporter asks for none
_REDIRECTS = 300  # this number, and what is above it, took nothing
_LATEST_NS = 2**64 - 1
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class NotTaken(NcclopsError):
    """The collector was not reached, or has refused the spans."""


def send(trace: Trace, endpoint: str | None) -> int:
    """Send ``trace``; return how many spans it had.

    ``endpoint`` is the collector's URL as in ``OTEL_EXPORTER_OTLP_ENDPOINT``, which holds without
    it, like all variables of the exporter. Waits as long as ``OTEL_EXPORTER_OTLP_TIMEOUT`` says
    (10 s a request). Raises ``UsageError`` for settings that cannot be followed and ``NotTaken``
    where the collector does not take the spans.
    """
    _check_variables()
    if endpoint is not None:
        _check_url("--endpoint", endpoint)
    elif (name := next(filter(os.environ.get, _ENDPOINTS), None)) is not None:
        _check_url(name, os.environ[name])
    url = None if endpoint is None else _url_of_traces(endpoint)
    with _words() as words:
        try:
            made = _spans(trace)
            session = _Session()
            exporter = OTLPSpanExporter(endpoint=url, session=session)
        except ValueError as error:
            raise UsageError(f"OpenTelemetry refuses a variable: {error}: correct it") from error
        try:
            for first in range(0, len(made), _AT_ONCE):
                if exporter.export(made[first : first + _AT_ONCE]) is not SpanExportResult.SUCCESS:
                    raise NotTaken(
                        f"the collector has not taken the trace: {session.problem or words[-1]}:"
                        f" {_advice(session.answered)}"
                    )
        finally:
            exporter.shutdown()
    return len(made)


def _advice(answered: int) -> str:
    if answered in (401, 403):
        return "give its token in OTEL_EXPORTER_OTLP_HEADERS (authorization=Bearer%20TOKEN)"
    if answered == 429 or answered >= 500:
        return "its own log says why; send the run again later"
    return "name its port for OTLP over HTTP, with --endpoint or OTEL_EXPORTER_OTLP_ENDPOINT"


def _check_url(name: str, url: str) -> None:
    """Of what is refused nothing is shown: it may hold a password or a token."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise UsageError(f"{name} is no URL of a collector: give one as http://collector:4318")


def _url_of_traces(endpoint: str) -> str:
    base = endpoint.rstrip("/")
    return base if base.endswith(_PATH) else base + _PATH


def _check_variables() -> None:
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        raise UsageError("OTEL_SDK_DISABLED=true: nothing is sent; unset it")
    protocol = next(filter(None, map(os.environ.get, _PROTOCOLS)), "http/protobuf")
    if protocol != "http/protobuf":
        name = next(name for name in _PROTOCOLS if os.environ.get(name))
        raise UsageError(
            f"{name}={protocol}: only http/protobuf is spoken here; unset it, and name the"
            " collector's port for HTTP (4318 as a rule)"
        )


class _Session(requests.Session):
    """Knows what was wrong with its last request: the exporter says that it has given up.

    Of an answer it takes the number and the head, all of it within the time for the request:
    requests itself would wait for so long for each byte, and read a body without end.
    """

    problem = ""
    answered = 0  # the number of the answer

    def request(self, method: Any, url: Any, *args: Any, **more: Any) -> Any:
        self.problem, self.answered = "", 0
        more["stream"] = True
        ask = partial(super().request, method, url, *args, **more)
        try:
            response = Answer(ask).get(more.get("timeout") or _REQUEST_LIMIT_S)
        except TimeoutError as error:
            self.problem = f"{_where(url)}: no whole answer in time"
            raise requests.Timeout(self.problem) from error
        except (requests.RequestException, OSError) as error:
            self.problem = f"{_where(url)}: {_innermost(error)}"
            raise
        self.answered = response.status_code
        response.close()
        response.raw = io.BytesIO()
        if not (response.ok and response.status_code < _REDIRECTS):
            self.problem = f"{_where(url)} answers {response.status_code} {response.reason}"
        if response.ok and self.problem:
            # The exporter takes it for success; it follows none, and neither do we.
            raise requests.RequestException(self.problem)
        return response


def _where(url: str) -> str:
    """Host and port of ``url``, without a name and a password in it."""
    return urlsplit(url).netloc.rpartition("@")[2] or url


def _innermost(error: BaseException) -> str:
    """What it began with, behind what urllib3 and requests have made of it."""
    while error.__context__ is not None:
        error = error.__context__
    return (isinstance(error, OSError) and error.strerror) or str(error)


class _Numbers(IdGenerator):
    """The ids of ``trace``, span after span in its order."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._place = -1

    def generate_trace_id(self) -> int:
        return self._trace.trace_id

    def generate_span_id(self) -> int:
        self._place += 1
        return self._trace.span_id(self._place)


class _Collected(SpanProcessor):
    """Keeps the spans that have ended."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


def _spans(trace: Trace) -> list[ReadableSpan]:
    collected = _Collected()
    # Of events the SDK keeps the last 128 of a span, where nothing else is asked for.
    every = None if "OTEL_SPAN_EVENT_COUNT_LIMIT" in os.environ else SpanLimits.UNSET
    provider = TracerProvider(
        sampler=ALWAYS_ON,
        resource=_resource(trace),
        shutdown_on_exit=False,
        id_generator=_Numbers(trace),
        span_limits=SpanLimits(max_events=every, max_span_attributes=None),
    )
    provider.add_span_processor(collected)
    tracer = provider.get_tracer("ncclops", __version__)
    made: list[Span] = []
    for each in trace.spans:
        above = None if each.parent is None else set_span_in_context(made[each.parent])
        span = tracer.start_span(
            each.name, above, attributes=each.attributes, start_time=_ns(each.start)
        )
        assert isinstance(span, Span)
        for event in each.events:
            span.add_event(event.name, event.attributes, _ns(event.at))
        if each.error is not None:
            span.set_status(Status(StatusCode.ERROR, each.error))
        made.append(span)
    for each, span in zip(trace.spans, made, strict=True):
        span.end(_ns(each.end))
    return collected.spans


def _resource(trace: Trace) -> Resource:
    # What OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES say goes first.
    ours = {SERVICE_NAME: "ncclops", SERVICE_VERSION: __version__, HOST_NAME: trace.host}
    asked = {
        name: value
        for name, value in Resource.create().attributes.items()
        if not (name == SERVICE_NAME and str(value).startswith("unknown_service"))
    }
    return Resource({name: value for name, value in (ours | asked).items() if value != ""})


def _ns(seconds: float) -> int:
    return min(max(int(seconds * 1e9), 0), _LATEST_NS)


@contextmanager
def _words() -> Iterator[list[str]]:
    """What the exporter says in the meantime, instead of on stderr."""
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage().rstrip("."))

    logger = logging.getLogger("opentelemetry")
    handler, propagate = Keep(logging.WARNING), logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
