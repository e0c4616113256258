"""Several sources are evaluated in one pass: the mean over all, and that of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli.verbs import report_on
from megatrain.config.sections import DataSource
from megatrain.data.training_rows import source_names
from megatrain.run.evaluation.mean_loss import MeanLoss
from megatrain.run.opening import training_data
from megatrain.run.trainer import Trainer
from testkit.runs import Setting, config_of

pytestmark = pytest.mark.usefixtures("cache_in_world")
CLOSE = 1e-6
"""Relative: sums in another order."""


@pytest.fixture
def files(world: Path, tmp_path: Path) -> tuple[str, str, str]:
    """Two files of rows that differ in difficulty, and one with the rows of both."""
    lines = (world / "rows.jsonl").read_text().splitlines(keepends=True)
    easy, sums, both = (tmp_path / f"{name}.jsonl" for name in ("easy", "sums", "both"))
    sums.write_text("".join(lines[:17]))
    easy.write_text("".join(_echo("ab" * (number % 7 + 2)) for number in range(11)))
    both.write_text(easy.read_text() + sums.read_text())
    return str(easy), str(sums), str(both)


def _echo(text: str) -> str:
    """Return a row whose answer is its question."""
    turns = [{"role": role, "content": text} for role in ("user", "assistant")]
    return json.dumps({"messages": turns}) + "\n"


def judged(world: Path, run: Path, held: Any, setting: Setting, **changes: Any) -> MeanLoss:
    """Return what a run makes of these sources before its first step."""
    config = config_of(world, run, setting, data={"eval": held, "packing": setting.packing})
    config = config.model_copy(update={"eval": config.eval.model_copy(update=changes)})
    with Trainer(config, dry_run=True) as trainer:
        found = trainer._judged()
    assert isinstance(found, MeanLoss)
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("packing", [True, False])
def test_each_source_has_its_own_mean_and_the_mean_of_all_keeps_its_bits(
    world: Path, tmp_path: Path, files: tuple[str, str, str], packing: bool
) -> None:
    easy, sums, both = files
    setting = Setting(packing=packing)
    together = judged(world, tmp_path / "run", [easy, sums], setting)
    assert judged(world, tmp_path / "run", both, setting).loss == together.loss
    alone = {Path(one).stem: judged(world, tmp_path / "run", one, setting) for one in files[:2]}
    assert together.by_source == {
        name: pytest.approx(found.loss, rel=CLOSE) for name, found in alone.items()
    }
    assert together.by_source["easy"] != pytest.approx(together.by_source["sums"], rel=1e-3)
    assert together.num_valid_tokens == sum(found.num_valid_tokens for found in alone.values())
    assert all(not found.by_source for found in alone.values())
    metrics = together.metrics()
    assert {name: metrics[f"eval_loss/{name}"] for name in alone} == together.by_source
    apart = ", ".join(f"{name} {together.by_source[name]:.4f}" for name in alone)
    assert together.in_words().startswith(f"loss {together.loss:.4f} ({apart}), perplexity ")


def test_documents_of_another_source_would_be_noticed(
    world: Path,
    tmp_path: Path,
    files: tuple[str, str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = judged(world, tmp_path / "run", list(files[:2]), Setting())
    numbers = training_data._numbers_of_sources

    def moved(*given: Any) -> Any:
        found = numbers(*given)
        assert found is not None
        found[0] = 1  # a document counts for the other source
        return found

    monkeypatch.setattr(training_data, "_numbers_of_sources", moved)
    found = judged(world, tmp_path / "run", list(files[:2]), Setting())
    assert found.loss == expected.loss
    for name, loss in expected.by_source.items():
        assert found.by_source[name] != pytest.approx(loss, rel=10 * CLOSE)


def test_the_limit_of_rows_leaves_a_part_of_each_source(
    world: Path, tmp_path: Path, files: tuple[str, str, str]
) -> None:
    easy, sums, _ = files
    found = judged(world, tmp_path / "run", [easy, sums], Setting(), max_rows=5)
    alone = {"easy": judged(world, tmp_path / "run", easy, Setting(), max_rows=1),
             "sums": judged(world, tmp_path / "run", sums, Setting(), max_rows=3)}  # fmt: skip
    assert found.by_source == {
        name: pytest.approx(one.loss, rel=CLOSE) for name, one in alone.items()
    }


def test_a_run_writes_and_draws_them(
    world: Path, tmp_path: Path, files: tuple[str, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    data, train = {"eval": list(files[:2])}, {"steps": 3}
    config = config_of(world, tmp_path / "run", Setting(), data=data, train=train)
    with Trainer(config) as trainer:
        trainer.train()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    found = [one for one in map(json.loads, lines) if "eval_loss" in one]
    assert [sorted(one.keys() & {"eval_loss/easy", "eval_loss/sums"}) for one in found] == [
        ["eval_loss/easy", "eval_loss/sums"]
    ] * 2
    assert f"(easy {found[-1]['eval_loss/easy']:.4f}, sums " in capsys.readouterr().err
    report_on([tmp_path / "run"], None)
    assert "Evaluation loss by source" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        (["a/math.jsonl", "b/chat.parquet"], ("math", "chat")),
        (["a/rows.jsonl", "b/rows.jsonl"], ("a/rows.jsonl", "b/rows.jsonl")),
        ([{"path": "x/gsm8k", "split": "test"}, "dir/"], ("gsm8k", "dir")),
        (
            [{"path": "x/mmlu", "name": "law"}, {"path": "x/mmlu", "name": "art"}],
            ("x/mmlu/law", "x/mmlu/art"),
        ),
        (["a.jsonl", "a.jsonl"], ("a.jsonl 1", "a.jsonl 2")),
    ],
)
def test_sources_have_short_names_that_differ(sources: list[Any], names: tuple[str, ...]) -> None:
    given = [DataSource(path=one) if isinstance(one, str) else DataSource(**one) for one in sources]
    assert source_names(given) == names
