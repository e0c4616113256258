"""The arguments of `mt.Trainer` that no config file can hold, checked before anything is opened.

    config, given = read_arguments(None, model="Qwen/Qwen3-0.6B", train_dataset=rows, ...)

Rows get a path that no file can have, so that a config tells where they came from, and everything
that reads a config works as it does with files.

Laws (tests/run/test_arguments.py)
    1. Whatever is given is used or refused, with what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatrain.config import Config
from megatrain.config.aliases import our_key
from megatrain.data.rows.in_memory import GivenRows
from megatrain.errors import ConfigError
from megatrain.losses.loss import Loss
from megatrain.ranks.ranks import ALONE, Ranks
from megatrain.run.callbacks import Callback, require_callback
from megatrain.run.evaluation.mean_loss import EvalPrediction

if TYPE_CHECKING:
    from megatrain.run.external_steps import OpenExternal

ComputeMetrics = Callable[[EvalPrediction], Mapping[str, float]]
_MOST_NAMES = 12
_TRAIN, _EVAL = "<train_dataset>", "<eval_dataset>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Arguments of `mt.Trainer` beside its config."""

    rows: Mapping[str, GivenRows] = field(default_factory=dict)
    """Rows in memory, by the path that the config has for them."""
    loss: Loss | None = None
    """None: the config decides."""
    callbacks: tuple[Callback, ...] = ()
    compute_metrics: ComputeMetrics | None = None
    open_external: OpenExternal | None = None
    """Another library's trainer takes the steps; None: the engine's own losses do."""


NOTHING_GIVEN = Given()


def read_arguments(
    config: Config | None,
    *,
    model: str | Mapping[str, Any] | None,
    train_dataset: Any,
    eval_dataset: Any,
    callbacks: Sequence[Callback],
    loss: Loss | Mapping[str, Any] | str | None,
    compute_metrics: ComputeMetrics | None,
    sections: Mapping[str, Any],
    ranks: Ranks = ALONE,
) -> tuple[Config, Given]:
    """Return the config of a run, and what else it was given. Raises ConfigError."""
    given = {
        path: GivenRows(path.strip("<>"), rows)
        for path, rows in ((_TRAIN, train_dataset), (_EVAL, eval_dataset))
        if rows is not None
    }
    if "args" in sections:
        raise ConfigError(_own_names(sections["args"]))
    if "resume_from_checkpoint" in sections:
        raise ConfigError(
            "resume_from_checkpoint belongs to train: trainer.train(resume_from_checkpoint=True)."
        )
    if isinstance(loss, Mapping | str):  # the section of that name
        sections, loss = {**sections, "loss": loss}, None
    if config is not None:
        _require_config(config, {"model": model, **{str(r): r for r in given.values()}, **sections})
    else:
        config = _config(model, given, sections)
    for path, rows in given.items():
        if rows.is_stream:
            _require_bounded(config, rows, is_judged=path == _EVAL)
    for callback in callbacks:
        require_callback(callback)
    if loss is not None and not isinstance(loss, Loss):
        raise ConfigError(
            f"loss is {loss!r:.80}: give an instance of a subclass of mt.Loss, such as "
            "loss=MyLoss(), or the settings of the section loss."
        )
    if loss is not None and config.loss.name != "next_token":
        raise ConfigError(
            f"loss is {type(loss).__name__} and loss.name of the config is {config.loss.name}. "
            "Give one of them."
        )
    if compute_metrics is not None and config.data.eval is None:
        raise ConfigError(
            "compute_metrics is given and there is nothing to evaluate on. Give eval_dataset, or "
            'data={"eval": 0.02}, which holds rows out.'
        )
    if compute_metrics is not None and config.loss.draws:
        raise ConfigError(
            f"compute_metrics is given and loss.name is {config.loss.name}: an evaluation has "
            "rewards for answers that are drawn, and no tokens of rows. Give it as a function of "
            "rewards, with weight 0 if it is only to be looked at."
        )
    if compute_metrics is not None and not ranks.owner.is_alone:
        raise ConfigError(
            f"compute_metrics needs all tokens in one process, not {ranks.owner.size} ranks. "
            "Train without it, and evaluate the checkpoints with one process."
        )
    return config, Given(
        rows=given, loss=loss, callbacks=tuple(callbacks), compute_metrics=compute_metrics
    )


def _own_names(args: Any) -> str:
    """Return the error for the arguments of transformers or TRL: our name of each that is set."""
    known = getattr(args, "__dataclass_fields__", {})
    given = vars(args) if known else dict(args) if isinstance(args, Mapping) else {}
    plain = (str, int, float, bool)
    ours = [
        f"{name} is {key}"
        for name, value in sorted(given.items())
        if isinstance(value, plain)
        and (key := our_key((name,))) is not None
        and value != getattr(known.get(name), "default", None)
    ]
    named = f" Of those given, {', '.join(ours[:_MOST_NAMES])}." if ours else ""
    return (
        "args: mt.Trainer takes the sections of a config instead, like train={...}, optim={...} "
        f"and save={{...}}.{named} docs/migration.md has our names of these and others."
    )


def _require_config(config: Any, others: Mapping[str, object]) -> None:
    if not isinstance(config, Config):
        raise ConfigError(
            f"the first argument is a {type(config).__name__}: give an mt.Config, or model=..., "
            "train_dataset=... by name."
        )
    if named := [name for name, value in others.items() if value is not None]:
        raise ConfigError(
            f"a config and {', '.join(named)} are given, but a config has its own model, data and "
            "sections. Leave the config out and give its sections, train={...} and others, by name."
        )


def _config(model: Any, given: Mapping[str, GivenRows], sections: Mapping[str, Any]) -> Config:
    if model is None:
        raise ConfigError("mt.Trainer needs a model: a folder or a Hub id, or an mt.Config.")
    if not isinstance(model, str | Mapping) and hasattr(model, "save_pretrained"):
        raise ConfigError(
            f"model is a {type(model).__name__} in memory, but weights are streamed from a folder: "
            'give its folder or Hub id, after model.save_pretrained("folder") if it was changed.'
        )
    data = sections.get("data", {})
    data = dict(data) if isinstance(data, Mapping) else {"train": data}
    for path, key in ((_TRAIN, "train"), (_EVAL, "eval")):
        if path not in given:
            continue
        if data.get(key) is not None:
            raise ConfigError(f"{given[path]} and data.{key} are both given. Give one of them.")
        data[key] = path
    if data.get("train") is None:
        raise ConfigError(
            'there is nothing to train on: give train_dataset=..., or data={"train": "rows.jsonl"}.'
        )
    # A path, a Mapping or a bad value: the config's own checks answer.
    named = str(model) if hasattr(model, "__fspath__") else model
    return Config(model=named, data=data, **{k: v for k, v in sections.items() if k != "data"})


def _require_bounded(config: Config, rows: GivenRows, *, is_judged: bool) -> None:
    """Raise ConfigError for a stream of which nobody knows how much a run needs."""
    if is_judged and config.eval.max_rows is None:
        raise ConfigError(
            f"{rows} is a stream without a length. Set eval.max_rows to the rows to evaluate on, "
            "or give list(rows)."
        )
    train = config.train
    if not is_judged and train.steps is not None and train.batch_tokens == "auto":
        raise ConfigError(
            f"{rows} is a stream without a length and train.batch_tokens is auto, so nobody knows "
            f"how much of it {train.steps} steps need. Set train.batch_tokens or train.batch_rows; "
            "or train.epochs instead of train.steps, which reads the stream to its end."
        )
