"""A template that loops or grows for ever costs a child process, not the run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatrain.data.chat.probe import probe_template, require_children
from megatrain.data.rows.rows import Row
from megatrain.errors import DataError
from testkit.patience import HANG_S
from testkit.tokenizers_of_kinds import made, tokenizer_of

TALK = Row(messages=({"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}))
_TEN = "{% for a in range(99999) %}"


@pytest.mark.merge
def test_templates_that_end_pass() -> None:
    probe_template(tokenizer_of("chatml"), TALK)


def test_a_template_that_raises_is_left_to_the_rows() -> None:
    probe_template(made("{{ raise_exception('no') }}", ("<s>",), eos="<s>"), TALK)


@pytest.mark.merge
def test_an_endless_template_is_killed() -> None:
    endless = made(_TEN * 4 + "{% endfor %}" * 4, ("<s>",), eos="<s>")
    with pytest.raises(DataError, match="did not finish one conversation in 4 s of proc"):
        probe_template(endless, TALK, limit_s=4)


def test_a_template_without_bounds_is_stopped() -> None:
    huge = made("{{ 'x' * 99999999999 }}", ("<s>",), eos="<s>")
    with pytest.raises(DataError, match="ended its process with code 3"):
        probe_template(huge, TALK)


def test_children_can_begin_here() -> None:
    require_children()


@pytest.mark.merge
@pytest.mark.parametrize("guarded", [False, True])
def test_a_script_that_cannot_be_imported_is_told_what_to_change(
    guarded: bool, tmp_path: Path
) -> None:
    """It does not wait for a child that died before it read what was to be given."""
    lines = [
        "from testkit.tokenizers_of_kinds import tokenizer_of",
        "from megatrain.data.rows.rows import Row",
        "from megatrain.data.chat.probe import probe_template",
        "if __name__ == '__main__':" if guarded else "if True:",
        "    talk = Row(messages=({'role': 'user', 'content': 'x' * 1_000_000},))",
        "    probe_template(tokenizer_of('chatml'), talk)",
    ]
    script = tmp_path / "script.py"
    script.write_text("\n".join(lines))
    root = Path(__file__).parents[3]
    ended = subprocess.run(
        [sys.executable, str(script)],
        env={"PYTHONPATH": f"{root}:{root / 'src'}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )
    told = "put its code under `if __name__" in ended.stderr
    assert (ended.returncode == 0, told) == (guarded, not guarded), ended.stderr
