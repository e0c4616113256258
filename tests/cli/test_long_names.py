"""A name that is too long for the system is refused with a message, wherever it is given."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatrain import Config
from megatrain.__main__ import main
from megatrain.errors import ConfigError

LONG = "a" * 5000


@pytest.mark.parametrize(
    "words",
    [
        ["train", LONG],
        ["train", "{config}", f"model={LONG}"],
        ["train", "{config}", f"data={LONG}"],
        ["train", "{config}", f"save={LONG}"],
        ["data", LONG, "-m", "{model}"],
        ["data", "{config}", "-m", LONG],
        ["eval", LONG, "{config}"],
        ["sample", LONG, "hello"],
        ["export", LONG, "{config}/out"],
        ["report", LONG],
        ["save", LONG],
        ["verify", LONG],
        ["init", LONG],
        ["init", "new.yaml", "--from", LONG],
        ["estimate", LONG, "--gpu", "4090"],
        ["demo", LONG],
    ],
    ids=lambda words: " ".join("LONG" if LONG in word else word for word in words),
)
def test_a_long_name_is_refused(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("model: m\ndata: rows.jsonl\n")
    (tmp_path / "model").mkdir()
    places = {"config": "run.yaml", "model": "model"}
    monkeypatch.setattr(sys, "argv", ["megatrain", *(word.format(**places) for word in words)])
    with pytest.raises(SystemExit) as ended:
        main()
    message = capsys.readouterr().err
    assert ended.value.code not in (0, 1, None), message
    assert "Traceback" not in message


@pytest.mark.parametrize("key", ["model", "data", "save"])
def test_a_config_refuses_it_at_once(key: str) -> None:
    with pytest.raises(ConfigError, match="at most 255 bytes between slashes"):
        Config.model_validate({"model": "m", "data": "rows.jsonl", key: LONG})
