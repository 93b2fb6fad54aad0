"""The row: one JSON object for each point and pass, and the rules that it must keep (`results/README.md`)."""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, NotRequired, TypedDict, cast

from harness import traces
from harness.documents import DEPTH, LONE, beyond, plain
from harness.errors import UserError
from harness.interface import DTYPES, Point
from harness.shapes import MoEShape

SCHEMA_VERSION = 1
RECORDS = ("measurement", "ratio")
STATUSES = (
    "ok",
    "unsupported",
    "not_installed",
    "wrong_result",
    "out_of_memory",
    "timeout",
    "crashed",
    "unstable",
)
#: Only these statuses may carry performance numbers.
MEASURED_STATUSES = ("ok", "unstable")
PASSES = ("forward", "backward", "forward_backward")
MODES = ("burst", "sustained", "paced")
MEASURED_ON = ("cuda", "cpu", "fake")
#: Of a ratio's times; ``busy``: of busy times although graphs can be captured, which only the gate asks for.
TIME_KINDS = ("device", "host", "busy")
#: Where a device time comes from: replay of a CUDA graph, or the union of the kernels' busy intervals.
BASES = ("graph", "busy")

#: Fields that hold times of one form (`TimeSummary`).
TIMES = ("latency_ms", "device_ms", "busy_ms")
#: Performance numbers: refused unless the status is one of `MEASURED_STATUSES`.
PERFORMANCE = (*TIMES, "kernels", "tflops", "gb_per_s", "memory_bytes", "training", "value", "ci95", "samples")


class RecordError(ValueError):
    """A row that breaks the rules. ``problems`` lists every one of them."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = list(problems)


class TimeSummary(TypedDict, total=False):
    """A time in ms. ``mode`` belongs to ``latency_ms``, ``basis`` and ``basis_reason`` to ``device_ms``."""

    median: float
    p05: float
    p95: float
    ci95: list[float]
    samples: int
    mode: str
    basis: str
    basis_reason: str


class Training(TypedDict):
    """A training step's numbers: rates (None: the run shared its GPU), model FLOPs utilisation (None also: no peak is
    known), processes, layers, steps of the run, the last one's loss and that of the validation after it in nats a token
    (None: there was none); of several processes on GPUs the shares of a step with communication, and with nothing but
    communication."""

    tokens_per_s: float | None
    tokens_per_day_per_gpu: float | None
    mfu: float | None
    world_size: int
    layers: int
    steps: int
    loss: float
    validation_loss: float | None
    communication: NotRequired[float]
    exposed_communication: NotRequired[float]


class MemoryBytes(TypedDict, total=False):
    """Bytes of one point; ``layer`` = ``static`` + ``held``."""

    static: int
    held: int
    peak: int | None
    layer: int


# The functional form, since `pass` is a keyword of the language.
Row = TypedDict(
    "Row",
    {
        "schema": int,
        "record": str,
        "run_id": str,
        "timestamp": str,
        "sweep": str,
        "operation": str,
        "variant": str,
        "pass": str,
        "implementation": str,
        "label": str,
        "numerator": str,
        "denominator": str,
        "numerator_label": str,
        "denominator_label": str,
        "denominator_variant": str,
        "denominator_routing": dict[str, Any],
        "time_kind": str,
        "value": float,
        "ci95": list[float],
        "samples": int,
        "basis": str,
        "basis_reason": str,
        "shape": dict[str, int],
        "problem": dict[str, Any],
        "dtype": str,
        "layer": dict[str, Any],
        "routing": dict[str, Any],
        "status": str,
        "reason": str,
        "correctness": dict[str, Any],
        "latency_ms": TimeSummary,
        "device_ms": TimeSummary,
        "busy_ms": TimeSummary,
        "kernels": list[dict[str, Any]],
        "tflops": dict[str, Any],
        "gb_per_s": dict[str, Any],
        "costs": dict[str, Any],
        "memory_bytes": MemoryBytes,
        "build_s": float,
        "backward_method": str,
        "stop_criterion": str,
        "dropped_samples": Any,
        "training": Training,
        "mode": str,
        "overhead_s": dict[str, float],
        "notes": list[str],
        "resume_key": str,
        "measured_on": str,
        "environment": dict[str, Any],
    },
    total=False,
)

_COMMON = (
    "schema",
    "record",
    "run_id",
    "timestamp",
    "sweep",
    "operation",
    "variant",
    "pass",
    "shape",
    "dtype",
    "layer",
    "routing",
    "status",
    "measured_on",
    "environment",
)
REQUIRED = {
    "measurement": (*_COMMON, "implementation", "label"),
    "ratio": (*_COMMON, "numerator", "denominator", "time_kind"),
}
_RATIO_NUMBERS = ("value", "ci95", "samples")
_RATIO_ONLY = (
    "numerator",
    "denominator",
    "denominator_variant",
    "denominator_routing",
    "numerator_label",
    "denominator_label",
    "time_kind",
    "basis",
    "basis_reason",
    *_RATIO_NUMBERS,
)
#: May be empty strings: an operation without variants has none.
_MAY_BE_EMPTY = ("variant",)
_CHOICES = {
    "record": RECORDS,
    "status": STATUSES,
    "pass": PASSES,
    "measured_on": MEASURED_ON,
    "mode": MODES,
    "time_kind": TIME_KINDS,
    "basis": BASES,
    "dtype": tuple(DTYPES),
}


#: JSON type of each field (`docs/schema.md`). ``a.b`` is the key b of the object a, or of each object in the list a; a
#: key that is not here may hold anything. null is as good as absent.
TYPES: dict[str, str] = {
    field: kind
    for kind, fields in {
        "text": """
            run_id timestamp sweep resume_key operation variant record pass dtype status reason measured_on
            stop_criterion backward_method mode implementation label numerator denominator numerator_label
            denominator_label denominator_variant time_kind basis basis_reason layer.activation layer.router_convention
            routing.method routing.distribution denominator_routing.method denominator_routing.distribution
            denominator_routing.trace_file latency_ms.mode device_ms.basis device_ms.basis_reason kernels.name
            kernels.role dropped_samples.reason environment.measured_on environment.gpu environment.gpu_uuid
            environment.driver environment.cuda environment.compute_capability environment.torch environment.triton
            environment.python environment.platform environment.host environment.cpu environment.commit
        """,
        "integer": """
            schema samples latency_ms.samples device_ms.samples busy_ms.samples shape.T shape.d shape.n shape.E shape.K
            problem.M problem.N problem.K problem.groups routing.seed routing.m_tile routing.routed_rows
            routing.padded_rows routing.dropped routing.added routing.empty_experts denominator_routing.seed
            denominator_routing.m_tile denominator_routing.routed_rows denominator_routing.padded_rows
            denominator_routing.dropped denominator_routing.added denominator_routing.empty_experts costs.flops
            costs.hardware_flops costs.boundary_bytes costs.algorithm_bytes memory_bytes.static memory_bytes.held
            memory_bytes.peak memory_bytes.layer dropped_samples.count environment.sm_count environment.l2_bytes
            environment.gpu_memory_bytes environment.gpu_index environment.cpu_threads training.world_size
            training.layers training.steps
        """,
        "number": """
            build_s value kernels.calls kernels.us costs.floor_share latency_ms.median latency_ms.p05 latency_ms.p95
            device_ms.median busy_ms.median tflops.host tflops.device tflops.hardware gb_per_s.host gb_per_s.device
            training.tokens_per_s training.tokens_per_day_per_gpu training.mfu training.loss training.validation_loss
            training.communication training.exposed_communication
        """,
        "object": """
            shape layer routing problem correctness correctness.relative_l2 correctness.worst_token_or_expert
            correctness.tolerance overhead_s latency_ms device_ms busy_ms tflops gb_per_s costs costs.floor_ms
            memory_bytes dropped_samples training denominator_routing environment environment.packages
            environment.during_samples
        """,
        "array": "notes kernels ci95 latency_ms.ci95 device_ms.ci95 busy_ms.ci95",
        "boolean": "layer.bias problem.gather environment.dirty",
    }.items()
    for field in fields.split()
}
_TYPE_TEXT = {
    "text": "text",
    "integer": "a whole number",
    "number": "a number",
    "object": "an object",
    "array": "a list",
    "boolean": "true or false",
}
#: Object or list of objects -> its keys' types.
_INNER: dict[str, dict[str, str]] = {}
for _field, _type in TYPES.items():
    if "." in _field:
        _INNER.setdefault(_field.split(".")[0], {})[_field.split(".")[1]] = _type
#: Of some objects every value is a number, whatever its name.
_OF_NUMBERS = (("overhead_s",), ("costs", "floor_ms"))
#: What every kernel of a breakdown has.
_OF_A_KERNEL = ("name", "calls", "us")
_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)", re.ASCII)


def gpu_slug(name: str) -> str:
    """A GPU's name as a folder name: ``NVIDIA H200`` -> ``nvidia_h200``. Raises `UserError` where nothing is left."""
    slug = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    if not slug:
        raise UserError(f"GPU name {name!r}: holds no letter or digit")
    return slug


def utc_now() -> str:
    """The time as ISO 8601 in UTC, whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def new_run_id() -> str:
    """The time and a few random digits: 20260131T120000-0a1b2c."""
    return f"{re.sub('[-:]', '', utc_now()[:19])}-{uuid.uuid4().hex[:6]}"


def point_fields(point: Point) -> dict[str, Any]:
    """A point's fields of the row, ``implementation`` included; the label is the caller's to add."""
    return {
        "operation": point.operation,
        "variant": point.variant,
        "implementation": point.implementation,
        "shape": point.shape.as_dict(),
        "dtype": point.dtype,
        "layer": asdict(point.layer),
        "routing": point.routing.as_dict(),
    }


def clean(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row in JSON's own types: tuples become lists, NumPy and torch scalars Python numbers, and halves of surrogate
    pairs in texts, which UTF-8 cannot hold, the sign for a lost character. What is nested too deeply stays as it is.

    A NaN or infinite error of a wrong result is a finding that JSON cannot write, so within ``correctness`` it becomes
    the text ``nan``, ``inf`` or ``-inf``; anywhere else it stays and `validate` refuses it."""

    def plain(value: Any, spell_out: bool, depth: int = 0) -> Any:
        if depth > DEPTH:
            return value
        if isinstance(value, Mapping):
            return {_text(key): plain(item, spell_out, depth + 1) for key, item in value.items()}
        if isinstance(value, (list, tuple, set, frozenset)):
            return [plain(item, spell_out, depth + 1) for item in value]
        if isinstance(value, str):
            return _text(value)
        if value is None or isinstance(value, (bool, int)):
            return value
        if isinstance(value, float):
            return str(value) if spell_out and not math.isfinite(value) else float(value)
        if hasattr(value, "item"):
            return plain(value.item(), spell_out, depth + 1)
        return value

    return {_text(key): plain(value, key == "correctness") for key, value in row.items()}


def _text(value: Any) -> str:
    text = str(value)
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def check(row: Mapping[str, Any]) -> Row:
    """The row itself where it keeps every rule; raises `RecordError` otherwise."""
    problems = validate(row)
    if problems:
        raise RecordError(problems)
    return cast(Row, row)


def validate(row: Any) -> list[str]:
    """Every rule that a row breaks, one sentence each; empty for a good row."""
    if not isinstance(row, Mapping):
        return [f"a row must be a JSON object, not {type(row).__name__}"]
    # One look that is enough for nearly every row.
    good = plain(row)
    wrong = "" if good else beyond(row)
    if wrong:
        return [wrong]
    schema = row.get("schema")
    if not isinstance(schema, int) or isinstance(schema, bool):
        return ["schema: missing; every row carries the number of its schema"]
    if schema > SCHEMA_VERSION:
        return [f"schema {schema} is newer than this harness reads ({SCHEMA_VERSION}); update the harness"]
    if schema < 1:
        return [f"schema {schema}: unknown; this harness writes {SCHEMA_VERSION}"]
    record = row.get("record")
    if record not in RECORDS:
        return [f"record {_shown(record)}: choose from {', '.join(RECORDS)}"]

    problems = _presence(row, record)
    if not good:
        problems += _finite(row, "")
    types = _types(row)
    if types:
        # What follows takes the types for granted.
        return problems + types
    problems += [
        f"{field} {_shown(row[field])}: choose from {', '.join(choices)}"
        for field, choices in _CHOICES.items()
        if row.get(field) is not None and row[field] not in choices
    ]
    problems += _identity(row)
    problems += _status_rules(row, record)
    problems += _numbers(row)
    return problems


def _shown(value: Any) -> str:
    """The value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _types(row: Mapping[str, Any]) -> list[str]:
    problems = []

    def unlike(where: str, value: Any, wanted: str) -> None:
        problems.append(f"{where}: must be {_TYPE_TEXT[wanted]}, not {_shown(value)}")

    for field, value in row.items():
        if field not in TYPES or value is None:
            continue
        if not _is_type(value, TYPES[field]):
            unlike(field, value, TYPES[field])
            continue
        inner = _INNER.get(field, {})
        if field != "kernels":
            for key, wanted in inner.items():
                part = value.get(key)
                if part is not None and not _is_type(part, wanted):
                    unlike(f"{field}.{key}", part, wanted)
            continue
        for number, kernel in enumerate(value, 1):
            where = f"{field}[{number}]"
            if not _is_type(kernel, "object"):
                problems.append(f"{where}: must be an object, not {_shown(kernel)}")
                continue
            for key, wanted in inner.items():
                part = kernel.get(key)
                if part is not None and not _is_type(part, wanted):
                    unlike(f"{where}.{key}", part, wanted)
            missing = [key for key in _OF_A_KERNEL if kernel.get(key) is None]
            if missing:
                problems.append(f"{where}: lacks {', '.join(missing)}")
    for path in _OF_NUMBERS:
        table: Any = row
        for key in path:
            table = table.get(key) if isinstance(table, Mapping) else None
        if isinstance(table, Mapping):
            for key, value in table.items():
                if value is not None and not _is_number(value):
                    unlike(f"{'.'.join(path)}.{key}", value, "number")
    return problems


def _is_type(value: Any, wanted: str) -> bool:
    if wanted == "text":
        return isinstance(value, str)
    if wanted == "integer":
        return _is_int(value)
    if wanted == "number":
        return _is_number(value)
    if wanted == "boolean":
        return isinstance(value, bool)
    if wanted == "object":
        # The dictionary first: to ask an abstract class takes long.
        return isinstance(value, (dict, Mapping))
    return isinstance(value, (list, tuple))


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _presence(row: Mapping[str, Any], record: str) -> list[str]:
    problems = []
    for field in REQUIRED[record]:
        value = row.get(field)
        if value is None or (value == "" and field not in _MAY_BE_EMPTY):
            problems.append(f"{field}: missing")
    for field in row:
        if field not in Row.__annotations__:
            problems.append(f"{field}: not a field of schema {SCHEMA_VERSION}")
        elif record == "measurement" and field in _RATIO_ONLY and row[field] is not None:
            problems.append(f"{field}: belongs to ratio rows only")
    return problems


def _finite(value: Any, where: str) -> list[str]:
    if isinstance(value, Mapping):
        keys = [f"{where}.{key}: a key that holds half a surrogate pair" for key in value if LONE.search(str(key))]
        return keys + [p for key, item in value.items() for p in _finite(item, f"{where}.{key}" if where else str(key))]
    if isinstance(value, (list, tuple)):
        return [p for i, item in enumerate(value) for p in _finite(item, f"{where}[{i}]")]
    if isinstance(value, str):
        return [f"{where}: holds half a surrogate pair, which is no character"] if LONE.search(value) else []
    if value is None or isinstance(value, (bool, int)):
        return []
    if isinstance(value, float):
        return [] if math.isfinite(value) else [f"{where}: {value} is not a finite number"]
    return [f"{where}: {type(value).__name__} is not a JSON type"]


def _identity(row: Mapping[str, Any]) -> list[str]:
    problems = []
    timestamp = row.get("timestamp")
    if timestamp is not None:
        try:
            moment = datetime.fromisoformat(timestamp)
        except ValueError:
            problems.append(f"timestamp {_shown(timestamp)}: must be ISO 8601, e.g. 2026-01-31T12:00:00+00:00")
        else:
            offset = moment.utcoffset()
            if offset is None or offset.total_seconds() != 0:
                problems.append(f"timestamp {timestamp!r}: must be in UTC")
            elif not _TIMESTAMP.fullmatch(timestamp):
                # Readers find the latest row by comparing texts.
                problems.append(f"timestamp {timestamp!r}: must be written as 2026-01-31T12:00:00+00:00 is")
    shape = row.get("shape")
    if shape is not None:
        try:
            MoEShape(**shape)
        except (TypeError, UserError) as error:
            problems.append(f"shape: {error}")
    for field, keys in (
        ("layer", ("activation", "router_convention", "bias")),
        ("routing", ("method", "distribution", "seed", "m_tile")),
        ("denominator_routing", ("method", "distribution", "seed", "m_tile")),
    ):
        value: Any = row.get(field)
        if value is None:
            continue
        missing = [key for key in keys if value.get(key) is None]
        if missing:
            problems.append(f"{field}: lacks {', '.join(missing)}")
        distribution = value.get("distribution") or ""
        if distribution.startswith("trace") and not traces.FORM.fullmatch(distribution):
            problems.append(f"{field}.distribution {_shown(distribution)}: a trace is written trace:NAME@HASH")
    environment = row.get("environment")
    if environment is not None:
        if not environment:
            problems.append("environment: must be an object that says where the row was measured")
        elif environment.get("measured_on", row.get("measured_on")) != row.get("measured_on"):
            problems.append(
                f"measured_on {row.get('measured_on')!r}: the environment says {environment['measured_on']!r}"
            )
    notes = row.get("notes")
    if notes is not None and not (isinstance(notes, list) and all(isinstance(note, str) for note in notes)):
        problems.append("notes: must be a list of sentences")
    return problems


def _status_rules(row: Mapping[str, Any], record: str) -> list[str]:
    problems = []
    status = row.get("status")
    reason = row.get("reason")
    if status in STATUSES and status != "ok" and not (reason or "").strip():
        problems.append(f"reason: missing; status {status} must say why")
    present = [field for field in PERFORMANCE if row.get(field) is not None]
    if status not in MEASURED_STATUSES:
        problems += [f"{field}: status {status} carries no performance numbers" for field in present]
        return problems
    if record == "ratio":
        if row.get("denominator_variant") is not None and row["denominator_variant"] == row.get("variant"):
            problems.append(f"denominator_variant {_shown(row['variant'])}: is there only where it is another variant")
        problems += [f"{field}: missing" for field in _RATIO_NUMBERS if row.get(field) is None]
        if row.get("time_kind") == "busy" and row.get("basis") != "busy":
            problems.append(f"basis {row.get('basis')!r}: a ratio that was asked for by busy times is of them")
    measured_on = row.get("measured_on")
    environment = row.get("environment")
    if measured_on == "cuda" and environment and not environment.get("gpu"):
        problems.append("environment.gpu: missing; a number measured on a GPU names it")
    if measured_on == "fake":
        timed = [field for field in present if field != "memory_bytes"]
        problems += [f"{field}: fake tensors run nothing, only memory can be traced" for field in timed]
    if measured_on == "cpu" and (row.get("device_ms") is not None or row.get("busy_ms") is not None):
        problems.append("device_ms: a CPU run has no device time, latency_ms only")
    if status == "ok" and _has_bad_error(row.get("correctness")):
        problems.append("correctness: an error that is NaN or infinite never passes")
    return problems


def _has_bad_error(value: Any) -> bool:
    """Whether errors in ``correctness`` are NaN or infinite, in words or as null (a ratio row nests one table for each
    of its two implementations)."""
    if isinstance(value, Mapping):
        errors = value.get("relative_l2")
        if isinstance(errors, Mapping) and any(error is None for error in errors.values()):
            return True
        return any(_has_bad_error(item) for item in value.values())
    if isinstance(value, list):
        return any(_has_bad_error(item) for item in value)
    return value in ("nan", "inf", "-inf")


def _numbers(row: Mapping[str, Any]) -> list[str]:
    problems = []
    for field in TIMES:
        summary = row.get(field)
        if summary is None:
            continue
        problems += _interval(summary, "median", field + ".")
        if "mode" in summary and summary["mode"] not in MODES:
            problems.append(f"{field}.mode {summary['mode']!r}: choose from {', '.join(MODES)}")
        if field == "device_ms" and summary.get("basis") not in BASES:
            problems.append(f"{field}.basis {summary.get('basis')!r}: choose from {', '.join(BASES)}")
    if row.get("record") == "ratio" and row.get("value") is not None:
        problems += _interval(row, "value", "")
    for field in ("tflops", "gb_per_s"):
        table: Any = row.get(field) or {}
        problems += [
            f"{field}.{key} {value}: must not be negative"
            for key, value in table.items()
            if _is_number(value) and value < 0
        ]
    kernels: Any = row.get("kernels") or ()
    problems += [
        f"kernels[{number}].us {kernel['us']}: must not be negative"
        for number, kernel in enumerate(kernels, 1)
        if kernel["us"] < 0
    ]
    memory = row.get("memory_bytes")
    if memory is not None:
        problems += _memory(memory)
    problems += _training(row)
    build_s: Any = row.get("build_s")
    if build_s is not None and build_s < 0:
        problems.append(f"build_s {build_s!r}: must be seconds")
    return problems


def _interval(table: Mapping[str, Any], centre: str, prefix: str) -> list[str]:
    """The rules of a positive median with its interval and its number of samples."""
    problems = []
    median: Any = table.get(centre)
    if not _is_number(median):
        return [f"{prefix}{centre}: missing or not a number"]
    if median <= 0:
        problems.append(f"{prefix}{centre} {median}: must be greater than zero")
    samples: Any = table.get("samples")
    if not _is_int(samples) or samples < 1:
        problems.append(f"{prefix}samples {samples!r}: must be a whole number of at least 1")
    ci95 = table.get("ci95")
    if not (isinstance(ci95, (list, tuple)) and len(ci95) == 2 and all(_is_number(end) for end in ci95)):
        problems.append(f"{prefix}ci95: must be [low, high]")
    elif not 0 < ci95[0] <= median <= ci95[1]:
        must = f"must be ordered and contain the {centre} {median}"
        if ci95[0] <= 0:
            must = "must lie above zero"
        problems.append(f"{prefix}ci95 [{ci95[0]}, {ci95[1]}]: {must}")
    for field, wrong in (("p05", lambda v: v > median), ("p95", lambda v: v < median)):
        value = table.get(field)
        if value is not None and (not _is_number(value) or wrong(value)):
            problems.append(f"{prefix}{field} {value!r}: lies on the wrong side of the {centre} {median}")
    return problems


#: Of a training step: no peak rate is known, nothing was evaluated.
_MAY_BE_UNKNOWN = ("mfu", "validation_loss")
#: Of several processes on GPUs, both or neither.
_COMMUNICATION = ("communication", "exposed_communication")
_TRAINING_RATES = ("tokens_per_s", "tokens_per_day_per_gpu", "mfu")


def _training(row: Mapping[str, Any]) -> list[str]:
    table, step = row.get("training"), row.get("operation") == "training_step"
    if table is None:
        expected = step and row.get("record") == "measurement" and row.get("status") in MEASURED_STATUSES
        return ["training: missing"] if expected else []
    if not step:
        return ["training: belongs to the operation training_step only"]
    needed = [key for key in Training.__annotations__ if key not in _COMMUNICATION]
    if set(table) - set(_COMMUNICATION) != set(needed):
        return [f"training: must be an object with {', '.join(needed)}; may have {', '.join(_COMMUNICATION)}"]
    # Without times (the GPU was shared with other runs) there are no rates either.
    may_be_unknown = _MAY_BE_UNKNOWN if row.get("latency_ms") else (*_MAY_BE_UNKNOWN, *_TRAINING_RATES)
    problems = [f"training.{key}: missing" for key in needed if table[key] is None and key not in may_be_unknown]
    for key in _TRAINING_RATES:
        if table[key] is not None and not row.get("latency_ms"):
            problems.append(f"training.{key} {table[key]!r}: must be null without latency_ms")
        if table[key] is not None and table[key] <= 0:
            problems.append(f"training.{key} {table[key]!r}: must be greater than zero")
    for key in ("world_size", "layers", "steps"):
        if table[key] is not None and table[key] < 1:
            problems.append(f"training.{key} {table[key]!r}: must be at least 1")
    share, exposed = (table.get(key) for key in _COMMUNICATION)
    if share is not None or exposed is not None:
        if share is None or exposed is None or not 0 <= exposed <= share <= 1:
            problems.append(
                f"training.communication {share!r}, training.exposed_communication {exposed!r}: must be shares of the "
                "step, the second within the first"
            )
        if table["world_size"] == 1 or row.get("measured_on") != "cuda":
            problems.append("training.communication: belongs to several processes on GPUs")
    if row.get("busy_ms") is not None and (table["world_size"] != 1 or not row.get("latency_ms")):
        problems.append("busy_ms: of a training step, belongs to one process, beside latency_ms")
    return problems


def _memory(memory: Mapping[str, Any]) -> list[str]:
    problems = []
    for key, value in memory.items():
        # `held` may fall below zero in principle: a forward that frees what an earlier one left behind.
        if value is not None and (not _is_int(value) or (value < 0 and key != "held")):
            problems.append(f"memory_bytes.{key} {value!r}: must be whole bytes")
    parts: list[Any] = [memory.get(key) for key in ("static", "held", "layer")]
    if all(_is_int(value) for value in parts) and parts[2] != parts[0] + parts[1]:
        problems.append(f"memory_bytes.layer {parts[2]}: must be static + held = {parts[0] + parts[1]}")
    return problems
