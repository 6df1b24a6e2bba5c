"""A run folder: the only thing between running and judging.

`RunWriter` gathers what a run's actors wrote; `RunFolder` reads it back and distrusts it: a folder without its
footer is an incomplete run.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
import numpy as np
import pandas as pd

from harness.errors import BadRunFolder
from harness.verdicts import CheckResult
from reference_impl.event_log import EventLog
from reference_impl.rules.events import Event, EventKind, Scalar
from workloads.operation_rows import ControlRows, EffectRow, FinalRow, Invocation, Look, RecordRow, columns_of
from workloads.rows import RequestRecord

if TYPE_CHECKING:
    from workloads.retry_storm import StormResult

T = TypeVar("T")
Row = TypeVar("Row", bound=msgspec.Struct)
FORMAT: Final = "pdproof-run/1"
FOOTER_ACTOR: Final = "run-folder"

REQUEST_COLUMNS: Final[dict[str, str]] = {
    "run_id": "string", "request_id": "string", "attempt": "int32", "phase": "string", "node_p": "string",
    "node_d": "string", "intended_ns": "int64", "send_began_ns": "int64", "sent_ns": "int64",
    "first_token_ns": "int64", "end_ns": "int64", "input_tokens": "int32", "max_tokens": "int32",
    "output_tokens": "int32", "outcome": "string", "http_status": "int32", "error": "string",
    "schedule_lag_ms": "float64", "ttft_ms": "float64", "ttft_from_intended_ms": "float64",
    "mean_decode_gap_ms": "float64", "e2e_ms": "float64", "content_ok": "boolean", "spoilt": "string",
    "session": "int32", "turn": "int32", "think_ms": "float64", "cached_tokens": "Int32", "kv_handed": "boolean",
}  # fmt: skip
_OF_LATER_FORMATS: Final[dict[str, int | float | bool | None]] = {
    "session": -1, "turn": 0, "think_ms": 0.0, "cached_tokens": None, "kv_handed": False,
}  # fmt: skip
"""Columns that older run folders lack, and what they would have held."""
CHUNK_COLUMNS: Final[dict[str, str]] = {"request_id": "string", "t_ns": "int64", "tokens": "int32"}
METRIC_COLUMNS: Final[dict[str, str]] = {"t_ns": "int64", "node": "string", "name": "string", "value": "float64"}
CONTROL_TABLES: Final[dict[str, type[msgspec.Struct]]] = {
    "operations.parquet": Invocation, "effects.parquet": EffectRow, "records.parquet": RecordRow,
    "groups.parquet": FinalRow, "looks.parquet": Look,
}  # fmt: skip
"""The tables of a control plane, and what their rows are. A run without one has none of them."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What ran. `emulated` names each part whose time or effect was not real; empty means all of it was real."""

    run_id: str
    scenario: str
    arm: str
    """"cold" or "shadow", or "" where the scenario has no arms."""
    title: str
    profile: str
    time_scale: float
    """Every emulated duration was divided by this, and arrivals came this many times faster."""
    seed: int
    started_wall_ns: int
    command: list[str]
    versions: dict[str, str]
    commit: str
    machine: dict[str, Scalar]
    configuration: dict[str, Any]
    clock_offsets_ns: dict[str, int] = {}
    emulated: list[str] = []

    def __post_init__(self) -> None:
        """Refuse what every reader divides by or looks into."""
        if not self.time_scale > 0:
            raise ValueError(f"time_scale must be above 0, got {self.time_scale}")


class EventsHeader(msgspec.Struct, frozen=True, tag_field="line", tag="header"):
    """First line of `events.jsonl`."""

    format: str
    run_id: str


class EventsFooter(msgspec.Struct, frozen=True, tag_field="line", tag="footer"):
    """Last line of `events.jsonl`: written when the run came to its end, with what must be found above it."""

    events: int
    requests: int
    chunks: int
    invocations: int = 0
    effects: int = 0
    records: int = 0
    groups: int = 0
    looks: int = 0


def request_row(run_id: str, record: RequestRecord, phase: str, content_ok: bool | None) -> dict[str, object]:
    """Return the row of `requests.parquet` for `record`; `content_ok` is None where no right answer is known."""
    derived = {
        name: getattr(record, name)
        for name in REQUEST_COLUMNS
        if name not in {"run_id", "phase", "input_tokens", "content_ok"}
    }
    return derived | {
        "run_id": run_id, "phase": phase, "input_tokens": record.prompt.input_tokens, "content_ok": content_ok,
    }  # fmt: skip


def frame(rows: Sequence[dict[str, object]], columns: dict[str, str]) -> pd.DataFrame:
    """Return `rows` as a table with exactly `columns`, typed, also when there are no rows."""
    return pd.DataFrame(list(rows), columns=list(columns)).astype(columns)


class RunWriter:
    """Makes a run folder at `path`, which must not exist yet.

    While the run goes on, actors write their own files under `parts/`; `finish` gathers them, writes the footer
    and removes the parts. A run that is broken off keeps its parts, and reads as incomplete.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        if path.exists():
            raise BadRunFolder(path, "exists already; choose another name or remove it")
        (path / "parts").mkdir(parents=True)
        (path / "logs").mkdir()
        self.path = path
        self.manifest = manifest
        (path / "manifest.json").write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))
        self.events = EventLog(self.events_part("harness"), "harness")
        self._metrics: list[tuple[int, str, str, float]] = []

    def events_part(self, actor: str) -> Path:
        """Return the path of `actor`'s own event file."""
        return self.path / "parts" / f"events-{actor}.jsonl"

    @property
    def parts(self) -> Path:
        """Where actors write; any `events-*.jsonl` and `requests-*.jsonl` here is gathered."""
        return self.path / "parts"

    @property
    def logs(self) -> Path:
        """Where each process's output goes."""
        return self.path / "logs"

    def metric(self, t_ns: int, node: str, name: str, value: float) -> None:
        """Add one scraped value."""
        self._metrics.append((t_ns, node, name, value))

    def finish(
        self, requests: Iterable[tuple[RequestRecord, str, bool | None]], control: ControlRows | None = None
    ) -> RunFolder:
        """Write all tables, then the footer, and return the finished folder.

        `requests`: record, phase, content_ok. `control`: the history of the control plane, None where there is none.
        """
        rows: list[dict[str, object]] = []
        chunk_ids: list[str] = []
        chunk_ns: list[int] = []
        chunk_tokens: list[int] = []
        for record, phase, content_ok in requests:
            rows.append(request_row(self.manifest.run_id, record, phase, content_ok))
            chunk_ids.extend([record.request_id] * len(record.chunks))
            chunk_ns.extend(c.t_ns for c in record.chunks)
            chunk_tokens.extend(c.tokens for c in record.chunks)
        frame(rows, REQUEST_COLUMNS).to_parquet(self.path / "requests.parquet")
        chunks = pd.DataFrame({"request_id": chunk_ids, "t_ns": chunk_ns, "tokens": chunk_tokens})
        chunks.astype(CHUNK_COLUMNS).to_parquet(self.path / "chunks.parquet")
        metrics = pd.DataFrame(self._metrics, columns=list(METRIC_COLUMNS))
        metrics.astype(METRIC_COLUMNS).to_parquet(self.path / "metrics.parquet")
        if control is not None:
            self._write_control(control)
        self.events.close()
        events = sorted(_read_parts(self.parts), key=lambda e: e.t_ns)
        footer = EventsFooter(
            events=len(events), requests=len(rows), chunks=len(chunk_ids), **_control_counts(control or ControlRows())
        )
        self._write_events(events, footer)
        shutil.rmtree(self.parts)
        return RunFolder(self.path)

    def _write_control(self, control: ControlRows) -> None:
        tables: list[Sequence[msgspec.Struct]] = [
            control.invocations, control.effects, control.records, control.groups, control.looks,
        ]  # fmt: skip
        for (name, kind), rows in zip(CONTROL_TABLES.items(), tables, strict=True):
            columns = {c: [getattr(row, c) for row in rows] for c in kind.__struct_fields__}
            pd.DataFrame(columns).astype(columns_of(kind)).to_parquet(self.path / name)

    def _write_events(self, events: list[Event], footer: EventsFooter) -> None:
        unfinished = self.path / "events.jsonl.part"
        with unfinished.open("wb") as out:
            for line in (EventsHeader(FORMAT, self.manifest.run_id), *events, footer):
                out.write(msgspec.json.encode(line) + b"\n")
        unfinished.rename(self.path / "events.jsonl")


def _control_counts(control: ControlRows) -> dict[str, int]:
    return {name: len(getattr(control, name)) for name in ControlRows.__struct_fields__}


def _read_parts(parts: Path) -> list[Event]:
    decoder = msgspec.json.Decoder(Event)
    found: list[Event] = []
    for path in sorted(parts.glob("events-*.jsonl")):
        with path.open("rb") as lines:
            found.extend(decoder.decode(line) for line in lines if line.endswith(b"\n"))
    return found


class RunFolder:
    """Reads a run folder. Raises `BadRunFolder` where a file is missing or cannot be what it says.

    Tables are pandas frames with the columns named above; `incomplete` is a reason, or None.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            raise BadRunFolder(path, "no such folder; `pdproof run` makes one")
        if not (path / "manifest.json").is_file():
            raise BadRunFolder(path, "holds no manifest.json, so it is not a run folder")

    @functools.cached_property
    def manifest(self) -> Manifest:
        """What ran."""
        return self._decode("manifest.json", Manifest)

    @functools.cached_property
    def incomplete(self) -> str | None:
        """Why this run must not be judged as a whole, or None if it is whole."""
        if not (self.path / "events.jsonl").is_file():
            return "the run was broken off: events.jsonl was never written"
        header, events, footer = self._event_lines
        if header is None or header.run_id != self.manifest.run_id:
            return "events.jsonl does not begin with this run's header"
        if footer is None:
            return "events.jsonl has no footer: it was cut short"
        found = EventsFooter(
            events=len(events), requests=len(self.requests), chunks=len(self.chunks), **_control_counts(self.control)
        )
        if found != footer:
            return f"the footer promises {footer}, the folder holds {found}"
        return None

    @functools.cached_property
    def _event_lines(self) -> tuple[EventsHeader | None, list[Event], EventsFooter | None]:
        lines = (self.path / "events.jsonl").read_bytes().split(b"\n")
        header: EventsHeader | None = None
        footer: EventsFooter | None = None
        events: list[Event] = []
        marks: msgspec.json.Decoder[EventsHeader | EventsFooter] = msgspec.json.Decoder(EventsHeader | EventsFooter)
        decode = msgspec.json.Decoder(Event).decode
        for number, line in enumerate(lines, 1):
            if not line:
                continue
            try:
                if line.startswith(b'{"line":'):
                    mark = marks.decode(line)
                    header, footer = (mark, footer) if isinstance(mark, EventsHeader) else (header, mark)
                else:
                    events.append(decode(line))
            except msgspec.DecodeError as error:
                if number == len(lines):  # no newline behind it: cut short while it was written
                    break
                raise BadRunFolder(self.path, f"events.jsonl line {number}: {error}") from error
        return header, events, footer

    @functools.cached_property
    def events(self) -> list[Event]:
        """All events in the order of their stamps (of an incomplete run: as far as they were written)."""
        if (self.path / "events.jsonl").is_file():
            return self._event_lines[1]
        return sorted(_read_parts(self.path / "parts"), key=lambda e: e.t_ns)

    def events_of(self, *kinds: EventKind) -> list[Event]:
        """Return the events of these kinds, in order."""
        return [e for e in self.events if e.kind in kinds]

    @functools.cached_property
    def requests(self) -> pd.DataFrame:
        """One row a request attempt, in the order of intended starts."""
        return self._table("requests.parquet", REQUEST_COLUMNS).sort_values("intended_ns", ignore_index=True)

    @functools.cached_property
    def chunks(self) -> pd.DataFrame:
        """One row a streamed chunk with content."""
        return self._table("chunks.parquet", CHUNK_COLUMNS)

    @functools.cached_property
    def metrics(self) -> pd.DataFrame:
        """One row a scraped value."""
        return self._table("metrics.parquet", METRIC_COLUMNS)

    @functools.cached_property
    def control(self) -> ControlRows:
        """The history of the control plane; without any row where there was none."""
        return ControlRows(
            invocations=self._rows("operations.parquet", Invocation), effects=self._rows("effects.parquet", EffectRow),
            records=self._rows("records.parquet", RecordRow), groups=self._rows("groups.parquet", FinalRow),
            looks=self._rows("looks.parquet", Look),
        )  # fmt: skip

    @functools.cached_property
    def storm(self) -> list[StormResult]:
        """The retry storms that were run behind it, with the retry budget and without; empty where there were none."""
        if not (self.path / "storm.json").is_file():
            return []
        from workloads.retry_storm import StormResult  # brings gRPC along, which no other reader of a folder needs

        return self._decode("storm.json", list[StormResult])

    @property
    def verdicts(self) -> list[CheckResult]:
        """What the checks last said; empty before `pdproof check`."""
        if not (self.path / "verdicts.json").is_file():
            return []
        return self._decode("verdicts.json", list[CheckResult])

    def write_verdicts(self, results: list[CheckResult]) -> None:
        """Replace the verdicts, whole or not at all."""
        text = msgspec.json.format(msgspec.json.encode(results), indent=2)
        partial = self.path / "verdicts.json.part"
        partial.write_bytes(text)
        partial.rename(self.path / "verdicts.json")

    @functools.cached_property
    def origin_ns(self) -> int:
        """The run's zero on its time axes: its first load phase's start, or its first event's stamp."""
        phases = self.events_of(EventKind.PHASE_STARTED) or self.events
        if not phases:
            raise BadRunFolder(self.path, "holds no event")
        return phases[0].t_ns

    def seconds(self, t_ns: int | np.ndarray | pd.Series[int]) -> Any:
        """Return monotonic nanoseconds as seconds since the run's origin."""
        return (t_ns - self.origin_ns) / 1e9

    def _decode(self, name: str, kind: type[T]) -> T:
        path = self.path / name
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except (OSError, msgspec.DecodeError) as error:
            raise BadRunFolder(self.path, f"{name}: {error}") from error

    def _rows(self, name: str, kind: type[Row]) -> list[Row]:
        table = self._table(name, columns_of(kind))
        if holed := [str(c) for c in table.columns if table[c].isna().any()]:
            raise BadRunFolder(self.path, f"{name} lacks values in {', '.join(holed)}")
        columns = [table[c].tolist() for c in kind.__struct_fields__]
        return [kind(**dict(zip(kind.__struct_fields__, row, strict=True))) for row in zip(*columns, strict=True)]

    def _table(self, name: str, columns: dict[str, str]) -> pd.DataFrame:
        path = self.path / name
        if not path.is_file():
            return frame([], columns)
        try:
            table = pd.read_parquet(path)
        except (OSError, ValueError) as error:
            raise BadRunFolder(self.path, f"{name}: {error}") from error
        for column in [c for c in _OF_LATER_FORMATS if c in columns and c not in table.columns]:
            table[column] = _OF_LATER_FORMATS[column]
        if missing := [c for c in columns if c not in table.columns]:
            raise BadRunFolder(self.path, f"{name} lacks the columns {', '.join(missing)}")
        try:
            return table[list(columns)].astype(columns)
        except (TypeError, ValueError) as error:
            raise BadRunFolder(self.path, f"{name} holds values of another type than it should: {error}") from error
