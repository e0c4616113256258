"""A run folder is read as far as it goes; only what holds no run is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatrain.errors import ConfigError
from megatrain.lanes.trace import Span, Trace
from megatrain.report.page import render
from megatrain.report.run import FILES, Run, SpanRecord, read_run
from megatrain.step.ops import Op, OpKind
from tests.report.fake_runs import jsonl, write_run
from tests.report.reading import read


def metrics(folder: Path, text: str) -> Run:
    (folder / "metrics.jsonl").write_text(text)
    return read_run(folder, "run")


def steps(*numbers: int, loss: float = 1.0) -> str:
    return jsonl([{"step": number, "loss": loss} for number in numbers])


def test_a_torn_last_line_is_no_fault_but_one_in_the_middle_is_counted(tmp_path: Path) -> None:
    run = metrics(tmp_path, steps(1, 2) + '{"step": 3, "lo')
    assert run.curve("loss") == [(1, 1.0), (2, 1.0)]
    assert run.notes == []
    run = metrics(tmp_path, steps(1) + '{"step": 2, "lo\n' + steps(3))
    assert run.curve("loss") == [(1, 1.0), (3, 1.0)]
    assert run.notes == ["metrics.jsonl: could not read 1 lines"]


def test_after_a_resume_the_later_life_counts(tmp_path: Path) -> None:
    evals = [{"step": 2, "eval_loss": 5.0}, {"step": 4, "eval_loss": 6.0}]
    text = steps(1, 2) + jsonl(evals[:1]) + steps(3, 4) + jsonl(evals[1:]) + steps(3, loss=7.0)
    run = metrics(tmp_path, text)
    assert run.curve("loss") == [(1, 1.0), (2, 1.0), (3, 7.0)]
    assert run.curve("eval_loss") == [(2, 5.0)]


def test_numbers_beyond_drawing_count_as_not_finite(tmp_path: Path) -> None:
    text = '{"step": 1, "loss": NaN, "a": -Infinity, "b": 1e300, "c": 1e-300, "d": %s, "e": true}\n'
    values = metrics(tmp_path, text % ("9" * 400)).steps[0].values
    assert math.isnan(values["loss"])
    assert [values[key] for key in "abcd"] == [-math.inf, math.inf, 0.0, math.inf]
    assert "e" not in values


def test_the_step_with_most_spans_is_shown(tmp_path: Path) -> None:
    def span(step: int, start: float) -> dict[str, object]:
        return {"ph": "X", "name": "f", "cat": "forward", "tid": 0, "ts": start, "dur": 5,
                "args": {"step": step}}  # fmt: skip

    events = [span(1, 1e6), span(2, 2e6), span(2, 3e6), span(3, 4e6)]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    spans = read_run(tmp_path, "run").spans
    assert [span.start_s for span in spans] == [0.0, 1.0]


def test_a_trace_of_the_engine_is_understood(tmp_path: Path) -> None:
    forward, fetch = Op(kind=OpKind.FORWARD, block=1, micro=0), Op(kind=OpKind.FETCH, block=1)
    trace = Trace()
    trace.add(Span(0, "in", fetch, 10**9, 2 * 10**9))
    trace.add(Span(0, "compute", forward, 10**9, 2 * 10**9, awaited=fetch))
    trace.add(Span(0, "compute", forward, 2 * 10**9, 4 * 10**9))
    trace.write(tmp_path / "trace.json")
    assert read_run(tmp_path, "run").spans == [
        SpanRecord("in", "fetch", "FETCH(1)", 0.0, 1.0),
        SpanRecord("compute", "wait", "wait for FETCH(1)", 0.0, 1.0),
        SpanRecord("compute", "forward", "FORWARD(1,0)", 1.0, 3.0),
    ]


@pytest.mark.parametrize("text", ["", "[]", "{", "null", "[" * 100_000, "\udcff\udcfe", "{}", "1"])
def test_no_content_raises(tmp_path: Path, text: str) -> None:
    for name in FILES:
        (tmp_path / name).write_text(f"{text}\n", errors="surrogateescape")
    read(render([read_run(tmp_path, "run")]))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=3,
)
KEYS = st.sampled_from(
    ["step", "loss", "grad_norm", "eval_loss", "split", "seconds", "ledger", "measured", "settings",
     "place", "num_bytes", "host_peak_bytes", "traceEvents", "args", "ts", "dur", "ph", "cat",
     "prompt", "text", "num_tokens"]
)  # fmt: skip
OBJECTS = st.dictionaries(KEYS, JSON, max_size=6)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.lists(OBJECTS, max_size=4), OBJECTS)
def test_no_json_raises(
    tmp_path: Path, objects: list[dict[str, object]], inner: dict[str, object]
) -> None:
    objects = [
        {"ledger": [inner], "traceEvents": [inner], "split": inner, **one} for one in objects
    ]
    for name in FILES:
        lines = objects if name.endswith("jsonl") else objects[:1]
        (tmp_path / name).write_text("\n".join(json.dumps(one) for one in lines))
    runs = [read_run(tmp_path, "one"), read_run(tmp_path, "two")]
    read(render(runs))
    read(render(runs[:1]))


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere is not a folder\. Give a run folder\."):
        read_run(tmp_path / "nowhere", "run")
    with pytest.raises(
        ConfigError,
        match=r"is not a run folder: it has none of config\.yaml, "
        r"machine",
    ):
        read_run(tmp_path, "run")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_left_out(tmp_path: Path, name: str) -> None:
    run = read_run(write_run(tmp_path, num_steps=30, without=frozenset({name})), "run")
    assert run.notes == []
    read(render([run]))
