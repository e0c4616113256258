"""The config of a run: its sections, and settings that exclude each other.

    Config(model="Qwen/Qwen3-8B", data="train.jsonl")      # from Python
    load_config("run.yaml", ["train.epochs=2"])            # from a file: load.py

sections.py has the keys.

Laws (tests/config/test_settings.py): a refused config is one ConfigError that names every fault;
an accepted one has no fault that can be known without the machine, model and data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from megatrain.cache import cache_folder
from megatrain.choices import StateDtype
from megatrain.config.faults import ConfigFault, faults_of, refusal, refuse_secrets
from megatrain.config.sections import (
    DataSettings,
    DataSource,
    EvalSettings,
    GroupSettings,
    LogSettings,
    LoraSettings,
    LossSettings,
    MemorySettings,
    ModelSettings,
    OptimSettings,
    RolloutSettings,
    RopeSettings,
    SaveSettings,
    Section,
    TrainSettings,
    short,
)
from megatrain.config.value_types import is_loopback
from megatrain.config.yaml_reader import Document
from megatrain.places import is_url

SHORT_FORMS = {"model": "name_or_path", "data": "train", "loss": "name", "save": "dir"}
"""Sections that may be one word, and the key that the word sets."""


class Config(Section):
    """Every setting of a run."""

    model: Annotated[ModelSettings, short(SHORT_FORMS["model"])]
    data: Annotated[DataSettings, short(SHORT_FORMS["data"])]
    lora: LoraSettings = Field(default_factory=LoraSettings)
    loss: Annotated[LossSettings, short(SHORT_FORMS["loss"])] = Field(default_factory=LossSettings)
    rollouts: RolloutSettings = Field(default_factory=RolloutSettings)
    train: TrainSettings = Field(default_factory=lambda: TrainSettings.model_validate({}))
    optim: OptimSettings = Field(default_factory=OptimSettings)
    memory: MemorySettings = Field(default_factory=MemorySettings)
    eval: EvalSettings = Field(default_factory=EvalSettings)
    save: Annotated[SaveSettings, short(SHORT_FORMS["save"])] = Field(default_factory=SaveSettings)
    log: LogSettings = Field(default_factory=LogSettings)

    if TYPE_CHECKING:  # a section may be a mapping, and some of them one word

        def __init__(
            self,
            *,
            model: ModelSettings | Mapping[str, Any] | str,
            data: DataSettings | Mapping[str, Any] | str,
            lora: LoraSettings | Mapping[str, Any] = ...,
            loss: LossSettings | Mapping[str, Any] | str = ...,
            rollouts: RolloutSettings | Mapping[str, Any] = ...,
            train: TrainSettings | Mapping[str, Any] = ...,
            optim: OptimSettings | Mapping[str, Any] = ...,
            memory: MemorySettings | Mapping[str, Any] = ...,
            eval: EvalSettings | Mapping[str, Any] = ...,
            save: SaveSettings | Mapping[str, Any] | str = ...,
            log: LogSettings | Mapping[str, Any] = ...,
        ) -> None: ...

    @model_validator(mode="wrap")
    @classmethod
    def _refuse(
        cls, value: Any, handler: ModelWrapValidatorHandler[Config], info: ValidationInfo
    ) -> Config:
        """Validate; raise one ConfigError that lists every fault and its place."""
        document = info.context if isinstance(info.context, Document) else _FROM_PYTHON
        refuse_secrets(value)  # first: other faults are told with the values of their keys
        if isinstance(value, Mapping):  # the keys of a section may all be commented out
            empty = {key for key in cls.model_fields if value.get(key, key) is None}
            value = {key: section for key, section in value.items() if key not in empty}
        try:
            config = handler(value)
        except ValidationError as error:
            faults = faults_of(error, document, FIELDS)
            raise refusal(document, faults, error.error_count()) from None
        vars(config)["data"] = _with_rows_in_steps(config)
        found = conflicts(config)
        if found:
            raise refusal(document, sorted(found, key=lambda fault: document.line(fault.path)))
        return config

    @property
    def step_tokens(self) -> int | None:
        """Most tokens of a step, as far as is known without the data; None: the plan decides."""
        if self.train.batch_tokens == "auto":
            return None
        samples = self.rollouts.samples if self.loss.draws else 1
        rows = (self.train.batch_rows or 1) * samples
        return self.train.batch_tokens or rows * self.data.max_length

    def settled(self, step_tokens: int) -> Config:
        """Return the config with so many tokens where it leaves them to the plan."""
        if self.train.batch_tokens != "auto":
            return self
        train = {**dict(self.train), "batch_tokens": step_tokens}
        return Config.model_validate({**dict(self), "train": train})

    @property
    def packs(self) -> bool:
        """Whether rows are packed, in a config that no longer leaves it open."""
        assert self.data.packing != "auto", "the model decides: see `decided`"
        return self.data.packing

    @property
    def kernels(self) -> Literal["none", "liger"]:
        """The fused kernels of layers, in a config that no longer leaves them open."""
        assert self.train.kernels != "auto", "model and device decide: see `decided`"
        return self.train.kernels

    def decided(
        self,
        *,
        packing: bool | None = None,
        learning_rate: float | None = None,
        kernels: Literal["none", "liger"] | None = None,
        state: StateDtype | None = None,
    ) -> Config:
        """Return the config with these choices where it has `auto`; None leaves it open.

        `state`, of a checkpoint, replaces a default: not a precision that the user names.
        """
        changed: dict[str, Any] = {}
        if self.data.packing == "auto" and packing is not None:
            changed["data"] = self.data.model_copy(update={"packing": packing})
        optim: dict[str, Any] = {}
        if self.optim.learning_rate == "auto" and learning_rate is not None:
            optim["learning_rate"] = learning_rate
        if "state" not in self.optim.model_fields_set and state is not None:
            optim["state"] = state
        if optim:
            changed["optim"] = self.optim.model_copy(update=optim)
        if self.train.kernels == "auto" and kernels is not None:
            changed["train"] = self.train.model_copy(update={"kernels": kernels})
        return self.model_copy(update=changed)

    @property
    def run_dir(self) -> str:
        """The run folder: save.dir, or one named after the model; of a bucket, one in the cache."""
        last = self.model.name_or_path.rstrip("/").rpartition("/")[2]
        if self.bucket is not None:
            mark = hashlib.sha256(self.bucket.encode()).hexdigest()[:12]
            return str(cache_folder() / "runs" / f"{self.bucket.rpartition('/')[2]}-{mark}")
        return self.save.dir or f"runs/{last or 'run'}"

    @property
    def bucket(self) -> str | None:
        """The URL of the run, where save.dir is one: the run folder is then a copy of it."""
        url = self.save.dir
        return url.rstrip("/") if url is not None and is_url(url) else None

    @property
    def keeps_reference(self) -> bool:
        """Whether the weights that training begins with stay in memory, for a loss to compare.

        Under adapters they are there anyway.
        """
        return self.loss.kl is not None and self.lora.rank is None and self.lora.path is None

    @property
    def keeps_best(self) -> bool:
        """Whether the best checkpoint is kept, and is the run's result."""
        wanted = self.save.best or self.eval.patience is not None
        return wanted and self.data.eval is not None


_FROM_PYTHON = Document(name="config", value=None)
SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type)
}
FIELDS = {
    **{name: tuple(section.model_fields) for name, section in SECTIONS.items()},
    "": tuple(SECTIONS),
    "model.rope": tuple(RopeSettings.model_fields),
    "data.train": tuple(DataSource.model_fields),
    "data.eval": tuple(DataSource.model_fields),
    "optim.groups": tuple(GroupSettings.model_fields),
}
"""The keys of each mapping."""


def conflicts(config: Config) -> list[ConfigFault]:
    """Return every conflict, at the key that is the cheapest to change."""
    return [
        *_length_of_run(config),
        *_batch(config),
        *_shares(config),
        *_learning_rate(config),
        *_groups(config),
        *_memory(config),
        *_patience(config),
        *_attention(config),
        *_kernels(config),
        *_products(config),
        *_lora(config),
        *_rewards(config),
    ]


def _fault(key: str, text: str) -> ConfigFault:
    return ConfigFault(path=tuple(key.split(".")), text=text)


def _length_of_run(config: Config) -> Iterator[ConfigFault]:
    train = config.train
    if train.epochs is not None and train.steps is not None:
        yield _fault(
            "train.steps",
            f"train.steps is {train.steps} and train.epochs is {train.epochs:g}. Give one of them "
            "and set the other to null.",
        )


def _with_rows_in_steps(config: Config) -> DataSettings:
    """Return the settings of data, whose default length of a row is at most that of a step."""
    data, sizes = config.data, (config.train.batch_tokens, config.train.micro_batch_tokens)
    longest = min([data.max_length, *(size for size in sizes if isinstance(size, int))])
    if "max_length" in data.model_fields_set or longest == data.max_length:
        return data
    return data.model_copy(update={"max_length": longest})


def _batch(config: Config) -> Iterator[ConfigFault]:
    length, batch = config.data.max_length, config.train.batch_tokens
    micro, rows = config.train.micro_batch_tokens, config.train.batch_rows
    if batch is not None and rows is not None:
        yield _fault(
            "train.batch_rows",
            f"train.batch_rows is {rows} and train.batch_tokens is {batch}. Give one of them and "
            "set the other to null.",
        )
    if isinstance(batch, int) and length > batch:
        yield _fault(
            "train.batch_tokens",
            f"data.max_length is {length} and train.batch_tokens is {batch}: a row would not fit a "
            "step. Raise train.batch_tokens or lower data.max_length.",
        )
    elif isinstance(micro, int) and length > micro:
        yield _fault(
            "train.micro_batch_tokens",
            f"data.max_length is {length} and train.micro_batch_tokens is {micro}: a row would not "
            "fit a micro-batch. Raise train.micro_batch_tokens, or set it to auto.",
        )
    if isinstance(batch, int) and isinstance(micro, int) and micro > batch:
        yield _fault(
            "train.micro_batch_tokens",
            f"train.micro_batch_tokens is {micro} and train.batch_tokens is {batch}: a micro-batch "
            "is a part of a step. Lower train.micro_batch_tokens, or set it to auto.",
        )


def _shares(config: Config) -> Iterator[ConfigFault]:
    sources = config.data.train
    if all(one.share is None for one in sources):
        return
    if config.loss.draws:
        yield _fault(
            "data.train",
            f"loss.name is {config.loss.name}, whose answers have no tokens yet: give sources a "
            "weight instead of a share.",
        )
    for number, one in enumerate(sources):
        if one.share is None:
            yield _fault(
                f"data.train.{number}.share",
                f"{one.path} has no share, and other sources have one. Give all of them one, or "
                "none.",
            )
        elif one.weight != 1:
            yield _fault(
                f"data.train.{number}.weight",
                f"{one.path} has share {one.share:g} and weight {one.weight:g}. Give one of them.",
            )


def _learning_rate(config: Config) -> Iterator[ConfigFault]:
    """Yield the faults that LRSchedule would refuse, as far as the number of steps is known."""
    warmup = config.optim.warmup
    decay = config.optim.decay if config.optim.schedule == "wsd" else 0
    steps = config.train.steps
    if steps is None and (isinstance(warmup, int) or isinstance(decay, int)):
        return
    parts = [part if isinstance(part, int) else round(part * (steps or 1000)) for part in
             (warmup, decay)]  # fmt: skip
    over = isinstance(warmup, float) and isinstance(decay, float) and warmup + decay > 1
    if over or sum(parts) > (steps or 1000):
        run = "the run" if steps is None else f"a run of {steps} steps"
        lengths = f"optim.warmup is {warmup}" + (f" and optim.decay is {decay}" if decay else "")
        yield _fault("optim.warmup", f"{lengths}: longer than {run}. Shorten it.")


def _groups(config: Config) -> Iterator[ConfigFault]:
    for number, group in enumerate(config.optim.groups):
        if group.learning_rate is not None and group.times != 1:
            yield _fault(
                f"optim.groups.{number}.times",
                f"the group {', '.join(group.params)} has learning_rate {group.learning_rate:g} "
                f"and times {group.times:g}. Give one of them.",
            )


def _memory(config: Config) -> Iterator[ConfigFault]:
    for key, text in config.memory.conflicts(compiles=config.train.compile is True):
        yield _fault(f"memory.{key}", text)


def _patience(config: Config) -> Iterator[ConfigFault]:
    patience = config.eval.patience
    if patience is None:
        return
    for key, value, repair in (
        ("data.eval", config.data.eval, "give a fraction or a file to evaluate on"),
        ("eval.every", config.eval.every, "set the steps between evaluations"),
    ):
        if value is None:
            yield _fault(
                "eval.patience",
                f"eval.patience is {patience} and {key} is null: no evaluation would stop the run. "
                f"Remove eval.patience, or {repair}.",
            )


def _attention(config: Config) -> Iterator[ConfigFault]:
    model = config.model
    if model.attn.startswith("flash") and model.dtype == "fp32":
        yield _fault(
            "model.attn",
            f"model.attn is {model.attn} and model.dtype is fp32: its kernels compute in bf16 "
            "only. Set model.dtype to bf16, or model.attn to sdpa.",
        )


def _kernels(config: Config) -> Iterator[ConfigFault]:
    train = config.train
    if train.kernels == "liger" and train.compile is True:
        yield _fault(
            "train.kernels",
            "train.kernels is liger and train.compile is true: a compiled layer has kernels that "
            "torch makes. Set train.kernels to auto, or train.compile to false.",
        )


def _products(config: Config) -> Iterator[ConfigFault]:
    if config.train.products == "fp8" and config.model.dtype == "fp32":
        yield _fault(
            "train.products",
            "train.products is fp8 and model.dtype is fp32: fewer bits than bf16 has are "
            "no use to products in fp32. Set train.products to plain, or model.dtype to bf16.",
        )


def _lora(config: Config) -> Iterator[ConfigFault]:
    lora = config.lora
    for key in (
        ("targets", "experts", "rank_pattern", "alpha_pattern", "modules_to_save")
        if lora.path is not None
        else ()
    ):
        if getattr(lora, key):
            yield _fault(
                f"lora.{key}",
                f"lora.{key} is given and lora.path is {lora.path}: what is adapted is that of the "
                "folder. Remove one of the two.",
            )
    if lora.rank is None and lora.path is None:
        for key in sorted(lora.model_fields_set - {"rank"}):
            if getattr(lora, key) != getattr(type(lora)(), key):
                yield _fault(
                    f"lora.{key}",
                    f"lora.{key} is given and lora.rank is null: there are no adapters. Set "
                    "lora.rank, or remove the other keys of lora.",
                )
        if config.model.base not in ("auto", "bf16"):
            yield _fault(
                "model.base",
                f"model.base is {config.model.base} and there are no adapters: weights that are "
                "trained, or saved with such, are kept in full. Set lora.rank, or remove "
                "model.base.",
            )
        return
    if config.model.frozen:
        yield _fault(
            "model.frozen",
            "model.frozen is given, and lora has adapters: all params of the model are frozen "
            "then. Remove model.frozen; lora.targets chooses the modules to adapt.",
        )
    if config.model.add_tokens and not lora.modules_to_save:
        yield _fault(
            "model.add_tokens",
            "model.add_tokens is given, and lora has adapters: the rows of new tokens would stay "
            "as they are, because the tables are frozen. Set lora.modules_to_save to the embedding "
            "and the output projection, like [embed_tokens, lm_head], or remove one of the two.",
        )


def _rewards(config: Config) -> Iterator[ConfigFault]:
    loss, train, data = config.loss, config.train, config.data
    if not loss.draws:
        if config.rollouts != type(config.rollouts)():
            yield _fault(
                "rollouts",
                f"rollouts is given and loss.name is {loss.name}, which trains on the answers of "
                "rows. Set loss.name to grpo, or remove rollouts.",
            )
        return
    if train.batch_rows is None:
        yield _fault(
            "train.batch_rows",
            f"loss.name is {loss.name} and train.batch_rows is null. Give it: the prompts of a "
            f"step, each with {config.rollouts.samples} answers (rollouts.samples).",
        )
    for key, usual, why in (
        ("overlong", "drop", "a prompt that is too long for its answer is left out"),
        ("train_on", "assistant", "the answers that are drawn are trained"),
        ("packing", "auto", "each answer is a row"),
    ):
        if getattr(data, key) not in (usual, False):
            yield _fault(
                f"data.{key}",
                f"data.{key} is {getattr(data, key)} and loss.name is {loss.name}: {why}. Remove "
                f"data.{key}.",
            )
    if config.rollouts.max_new_tokens >= data.max_length:
        yield _fault(
            "rollouts.max_new_tokens",
            f"rollouts.max_new_tokens is {config.rollouts.max_new_tokens} and data.max_length is "
            f"{data.max_length}: no prompt has room before such an answer. Raise data.max_length.",
        )
    yield from _server(config.rollouts)
    lora = config.lora
    for key, way_out in (
        (
            "path",
            "Merge these adapters (megatrain export FOLDER MERGED --merge) and train new ones "
            "over the result, or remove loss.kl.",
        ),
        ("dora", "Remove lora.dora or loss.kl."),
        ("modules_to_save", "Remove lora.modules_to_save or loss.kl."),
    ):
        if loss.kl is not None and getattr(lora, key):
            yield _fault(
                f"lora.{key}",
                f"loss.kl is {loss.kl:g} and lora.{key} is given: the base alone is not the model "
                f"as it began. {way_out}",
            )


def _server(rollouts: RolloutSettings) -> Iterator[ConfigFault]:
    """Yield what is wrong with the server that draws."""
    server = rollouts.server
    for key in ("server", "weights_folder"):
        if getattr(rollouts, key) and rollouts.engine != "vllm":
            yield _fault(
                f"rollouts.{key}",
                f"rollouts.{key} is given and rollouts.engine is {rollouts.engine}, which has no "
                f"server. Set rollouts.engine to vllm, or remove rollouts.{key}.",
            )
    if server and not server.startswith(("http://", "https://")):
        yield _fault(
            "rollouts.server",
            f"rollouts.server is {server}, no address of a server: http://127.0.0.1:8000 is one.",
        )
    elif server and not is_loopback(server) and rollouts.weights_folder is None:
        yield _fault(
            "rollouts.weights_folder",
            f"rollouts.server is {server}, on another host, and rollouts.weights_folder is null. "
            "Give a folder that both hosts have under one name: the weights go through it.",
        )
