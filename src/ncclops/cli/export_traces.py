"""``ncclops export-traces``: a run's events as spans, to an OpenTelemetry collector."""

from __future__ import annotations

from typing import Annotated

import typer

from ncclops.cli._options import RunArgument
from ncclops.cli._output import echo


def export_traces(
    run: RunArgument = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            "--endpoint",
            metavar="URL",
            help="The collector, for OTLP over HTTP; default: OTEL_EXPORTER_OTLP_ENDPOINT, then "
            "http://localhost:4318.",
        ),
    ] = None,
) -> int:
    """Send a run to an OpenTelemetry collector, as one trace, with secrets taken out.

    The run is the root; below it is where time went, with faults, restarts and stops as events. A
    run that is sent again is the same trace. The variables OTEL_EXPORTER_OTLP_* are honoured.
    """
    from ncclops.errors import UsageError
    from ncclops.record.runs import find

    try:
        from ncclops.traces.otlp import send
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("opentelemetry", "requests"):
            raise
        raise UsageError(
            f"export-traces needs OpenTelemetry ({error.name} is not installed):"
            " pip install 'ncclops[otel]'"
        ) from error
    from ncclops.traces.reading import read

    trace = read(find(run).path)
    count = send(trace, endpoint)
    echo(f"{count} spans sent: trace {trace.trace_id:032x} of run {trace.run_id}")
    return 0
