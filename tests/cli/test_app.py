"""The command line answers at once, and a failure is one message and an exit code."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import megatrain
from megatrain import __main__ as main_module
from megatrain.cli import app as cli
from megatrain.config.sections import DataSource
from megatrain.errors import DoesNotFit
from testkit.effort import children_s, require_effort

ROOT = Path(__file__).parents[2]


def _run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatrain", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False)


VERBS = sorted(
    info.name or info.callback.__name__  # type: ignore[union-attr]
    for info in cli.app.registered_commands
)


@pytest.mark.few(6)
@pytest.mark.parametrize(
    "words", [("--help",), ("--version",), *((verb, "--help") for verb in VERBS)], ids=" ".join
)
def test_answers_at_once(words: tuple[str, ...]) -> None:
    """Measured 0.15 s, nearly all of it the interpreter and typer."""

    def ask() -> None:
        assert _run(*words).returncode == 0

    require_effort(ask, at_most=8, clock=children_s)


def test_heavy_libraries_are_not_imported_for_help() -> None:
    code = f"""
import sys
from pathlib import Path
from megatrain.cli.app import app
for verb in {VERBS}:
    try:
        app([verb, "--help"])
    except SystemExit:
        pass
print({{"torch", "transformers", "numpy", "rich"}} & set(sys.modules))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert len(VERBS) == result.stdout.count("Usage: ") >= 8
    assert result.stdout.splitlines()[-1] == "set()"


def test_a_config_for_a_model_and_rows_is_planned_without_torch(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    words = ["init", str(tmp_path / "run.yaml"), "--model", "Qwen/Qwen3-0.6B", "--data",
             str(tmp_path / "rows.jsonl"), "--gpu", "4090", "--ram", "128GB"]  # fmt: skip
    code = f"""
import sys
from megatrain.cli.app import app
app({words!r}, standalone_mode=False)
print({{"torch", "transformers"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
    assert (tmp_path / "run.yaml").read_text().startswith("# fits: ")


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_an_example_that_it_would_take(verb: str) -> None:
    command = get_command(cli.app).commands[verb]  # type: ignore[attr-defined]
    given = re.fullmatch(r"Example: megatrain (\S+) (.*)", command.epilog)
    assert given
    assert given[1] == verb
    command.make_context(verb, shlex.split(given[2]))  # parses, and does nothing


@pytest.mark.parametrize(("text", "code"), [("2x", 2), ("0", 2), ("2k", 4)])
def test_lengths_are_read_as_in_a_config(text: str, code: int, tmp_path: Path) -> None:
    done = _run("data", str(tmp_path / "rows.jsonl"), "-m", "no/such/model", "--max-length", text)
    assert done.returncode == code, done.stderr
    assert ("--max-length is " in done.stderr) == (code == 2)


@pytest.mark.parametrize(
    ("text", "words", "fault"),
    [
        ("model: m\ndata: {trian: a.jsonl}\n", (), "unknown key data.trian"),
        ("model: m\ndata: a.jsonl\n", ("optim.rate=1e-5",), "optim.rate"),
        ("model: beside\ndata: a.jsonl\n", (), "relative paths start at the working directory"),
    ],
)
def test_a_fault_of_the_config_is_told_before_torch_is_imported(
    text: str, words: tuple[str, ...], fault: str, tmp_path: Path
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(text)
    (tmp_path / "beside").mkdir()
    code = f"""
import sys
from pathlib import Path
from megatrain.cli.app import app
from megatrain.errors import ConfigError
try:
    app(["train", {str(config)!r}, *{words!r}])
except ConfigError as error:
    print(error)
print({{"torch", "transformers", "numpy"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert fault in done.stdout
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    ("setting", "taken", "fault"),
    [
        ("save.keep=1", True, "run already has a run. Continue it with --resume"),
        ("log.to=[tensorboard]", False, "log.to: tensorboard not installed"),
    ],
)
def test_a_run_that_cannot_begin_is_refused_before_torch_is_imported(
    setting: str, taken: bool, fault: str, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text("model: acme/tiny\ndata: a.jsonl\nsave: {dir: run}\n")
    (tmp_path / "run").mkdir()
    if taken:
        (tmp_path / "run" / ".megatrain").write_text('{"megatrain": "run folder"}\n')
        (tmp_path / "run" / "metrics.jsonl").touch()
    code = f"""
import sys
sys.modules["tensorboard"] = None  # as if it were not installed
from megatrain.cli.app import app
from megatrain.errors import MegaTrainError
try:
    app(["train", "run.yaml", {setting!r}])
except MegaTrainError as error:
    print(error)
print({{"torch", "transformers", "numpy"}} & set(sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert fault in done.stdout
    assert done.stdout.splitlines()[-1] == "set()"


def test_a_value_that_an_option_does_not_take_is_named_in_our_words() -> None:
    told = CliRunner().invoke(cli.app, ["train", "--method", "ppo"]).output
    assert "Invalid value for '--method': 'ppo' is not one of 'sft', 'lora'," in told


def test_rows_have_the_formats_of_the_config() -> None:
    shown = CliRunner().invoke(cli.app, ["data", "--help"]).stdout
    formats = get_args(DataSource.model_fields["format"].annotation)
    assert "tokens" in formats
    assert "|".join(formats) in re.sub(r"\s", "", shown)


@pytest.mark.parametrize(
    ("given", "device", "policy"),
    [
        ({}, None, "PASSIVE"),
        ({}, "nvidia0", None),
        ({}, "kfd", None),
        ({}, "nvidiactl", "PASSIVE"),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, None, "ACTIVE"),
        ({"GOMP_SPINCOUNT": "5"}, None, None),
    ],
)
def test_threads_sleep_where_a_processor_computes_and_nobody_chose(
    given: dict[str, str], device: str | None, policy: str | None, tmp_path: Path
) -> None:
    if device is not None:
        (tmp_path / device).touch()
    environ = dict(given)
    main_module.let_threads_sleep(environ, tmp_path)
    assert environ.get("OMP_WAIT_POLICY") == policy


def test_an_error_of_ours_is_a_message_and_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: object) -> None:
        raise DoesNotFit("host memory: too little")

    monkeypatch.setattr(main_module, "app", fail)
    with pytest.raises(SystemExit) as exit_info:
        main_module.main()
    assert exit_info.value.code == 3
    assert capsys.readouterr().err == "DoesNotFit [MT301]: host memory: too little\n"


def test_public_names() -> None:
    assert set(megatrain._HOMES) | {"__version__"} == set(megatrain.__all__) == set(dir(megatrain))
    for name in megatrain.__all__:
        assert getattr(megatrain, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = megatrain.nothing


def test_an_expression_of_a_tokenizer_that_never_ends_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Tokenizers panics then: an error that is no Exception, and would be a traceback."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    hostile = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    hostile.pre_tokenizer = pre_tokenizers.Split(Regex("(?=(a+)+b)"), "isolated")

    def sample(**_: object) -> None:
        hostile.encode("a" * 40 + "!")

    monkeypatch.setattr(main_module, "app", sample)
    with pytest.raises(SystemExit) as ended:
        main_module.main()
    assert ended.value.code == 4
    said = capfd.readouterr().err
    assert "DataError [MT408]: a tokenizer gave up on a text: Onig: Regex search error" in said
    assert "Traceback" not in said
    assert "tokenizer.json" in said


def test_other_failures_without_end_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop(BaseException):
        pass

    def stop(**_: object) -> None:
        raise Stop

    monkeypatch.setattr(main_module, "app", stop)
    with pytest.raises(Stop):
        main_module.main()
