"""Every setting of a run: its key, what it means, its unit, its default.

    Config(model="Qwen/Qwen3-8B", data="train.jsonl")      # from Python
    load_config("run.yaml", ["train.epochs=2"])            # from a file: load.py

Values are plain and immutable. `auto` stays `auto` here; the plan decides it. The descriptions are
the reference: docs/config.md is written from them.

Laws (tests/config/test_settings.py): a refused config is one ConfigError that names every fault;
an accepted one has no fault that can be known without the machine, model and data.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from megatrain.config.conflicts import conflicts
from megatrain.config.data_settings import DataSettings, DataSource
from megatrain.config.faults import faults_of, refusal
from megatrain.config.lora_settings import LoraSettings
from megatrain.config.loss_settings import LossSettings
from megatrain.config.output_settings import EvalSettings, LogSettings, SaveSettings
from megatrain.config.quantities import or_auto, read_tokens
from megatrain.config.rope_settings import Rope, RopeSettings
from megatrain.config.section import Section, retired, short
from megatrain.config.value_types import (
    Beta,
    LayerCount,
    Length,
    Name,
    NewTokens,
    Number,
    OptionalTokens,
    Patterns,
    Rate,
    Seed,
    Size,
    SlotCount,
    StepCount,
    Switch,
    TypeName,
    Whole,
    read_device,
)
from megatrain.config.yaml_reader import Document

SHORT_FORMS = {"model": "name_or_path", "data": "train", "loss": "name", "save": "dir"}
"""Sections that may be one word, and the key that the word sets."""


class ModelSettings(Section):
    """The model and its precision."""

    name_or_path: Name = Field(
        description="Model folder, or id on the Hugging Face Hub; an existing folder wins."
    )
    revision: Annotated[Name | None, TypeName("branch, tag or commit, or null")] = Field(
        default=None,
        description="Version of a model on the Hub; null is main; the run folder records the "
        "commit, and a resumed run uses it.",
    )
    dtype: Literal["bf16", "fp32"] = Field(
        default="bf16", description="Precision of the weights in compute; masters are always fp32."
    )
    attn: Literal["auto", "sdpa", "eager", "flash_attention_2"] = Field(
        default="auto",
        description="Attention implementation; auto is sdpa if transformers has it for the family, "
        "else eager; flash_attention_2 needs the package flash-attn and dtype bf16.",
    )
    frozen: Patterns = Field(
        default=(),
        description="Params that are not trained, like model.embed_*; a pattern without a match "
        "is an error.",
    )
    add_tokens: NewTokens = Field(
        default=(),
        description="New special tokens for tokenizer, embedding, head and exports; they use spare "
        "rows first, and a new row starts as the mean of the others.",
    )
    rope: Rope = Field(
        default=None,
        description="Scaling of rotary positions for rows beyond those that the model declares; "
        "checkpoints and exports carry it; null is as the model declares.",
    )


_ONE_OF_TWO = (("epochs", "steps", 1), ("batch_tokens", "batch_rows", "auto"))
"""Keys of which one is given, and the default of the first."""


class TrainSettings(Section):
    """Length of the run and size of its steps."""

    epochs: Annotated[Annotated[Number, Field(gt=0)] | None, TypeName("number or null")] = Field(
        default=None, description="Passes over the data; 1 if neither epochs nor steps is given."
    )
    steps: Annotated[StepCount | None, TypeName("steps or null")] = Field(
        default=None, description="Optimizer steps of the run, instead of epochs."
    )
    batch_tokens: OptionalTokens = Field(
        default="auto",
        description="Tokens of one optimizer step, whatever the number of micro-batches; auto is "
        "the shortest step of at least 16384 tokens that has 95 % of the speed of a very long one "
        "on this machine, within memory, with at least 50 steps in an epoch; a resumed run keeps "
        "its number.",
    )
    batch_rows: Annotated[Annotated[Whole, Field(ge=1)] | None, TypeName("rows or null")] = Field(
        default=None,
        description="Exact number of rows of one optimizer step, packed or not, instead of "
        "batch_tokens; the last step of an epoch may have fewer.",
    )
    micro_batch_tokens: Annotated[
        int | Literal["auto"],
        PlainValidator(or_auto(read_tokens)),
        TypeName("tokens, like 8192 or 8k, or auto"),
    ] = Field(default="auto", description="Tokens that the device processes at a time.")
    max_grad_norm: Annotated[Annotated[Number, Field(gt=0)] | None, TypeName("number or null")] = (
        Field(
            default=1.0,
            description="Global gradient norm to clip to; null does not clip and updates weights "
            "during backward, which saves 2 bytes per parameter.",
        )
    )
    router_aux_loss: Annotated[
        Annotated[Number, Field(ge=0)] | Literal["auto", "model"],
        TypeName("number, auto or model"),
    ] = Field(
        default="auto",
        description="Coefficient of the load-balancing loss of a mixture of experts; model uses "
        "the model's own; auto uses it if config.json sets output_router_logits, else 0.",
    )
    seed: Seed = Field(default=42, description="Seed for dropout and for new adapters.")
    on_nonfinite: Literal["stop", "skip", "rollback"] = Field(
        default="stop",
        description="Reaction to a step whose gradient is not finite, twice; rollback returns to "
        "the last checkpoint and leaves the step out.",
    )
    on_spike: Literal["record", "stop", "rollback"] = Field(
        default="record",
        description="Reaction to a step whose loss or gradient norm is far above the last 64.",
    )
    compile: Switch = Field(
        default=False,
        description="Compile the layers with torch.compile, which changes the last bits; auto does "
        "so on an accelerator, unless documents are packed or layers run over tiles.",
    )
    kernels: Literal["none", "liger"] = Field(
        default="none",
        description="Fused kernels for norms and feed-forward on an accelerator, which change the "
        "last bits; liger needs the package liger-kernel.",
    )
    rank_deadline: Number = Field(
        default=600.0,
        gt=0,
        description="Seconds after which a silent rank is lost, and all end; a save is given up "
        "when a file call takes a quarter of it; one process alone ignores it.",
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, value: Any) -> Any:
        """Fill in one of two alternative keys, if neither is given."""
        if isinstance(value, Mapping):
            for key, other, default in _ONE_OF_TWO:
                if value.get(key) is None:
                    value = {**value, key: default if value.get(other) is None else None}
        return value


class OptimSettings(Section):
    """The optimizer and its learning rate."""

    name: Literal["adamw"] = Field(default="adamw", description="The optimizer.")
    learning_rate: Rate = Field(
        default="auto",
        description="Peak learning rate; auto is 1e-5 for fine-tuning and 1e-6 for preferences, "
        "with adapters ten times as much; a resumed run keeps its number.",
    )
    betas: Annotated[tuple[Beta, Beta], TypeName("two numbers")] = Field(
        default=(0.9, 0.95), description="Decay rates of the first and second moment."
    )
    eps: Number = Field(default=1e-8, gt=0, description="Added to the root of the second moment.")
    weight_decay: Number = Field(
        default=0.0,
        ge=0,
        description="Decoupled weight decay of matrices; norms and biases do not decay.",
    )
    no_decay: Patterns = Field(
        default=(),
        description="More params without decay; a pattern without a match is an error.",
    )
    state: Literal["auto", "fp32", "bf16", "8bit"] = Field(
        default="auto",
        description="How exactly the moments are kept, in 8, 4 or 2.03 bytes per parameter beside "
        "fp32 masters; auto is the first of them that fits, and a resumed run keeps the one it "
        "has.",
    )
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        default="cosine", description="Shape of the learning rate; wsd holds the peak, then decays."
    )
    warmup: Length = Field(
        default=0.03,
        description="Length of the linear increase from 0 to the peak; as in transformers, the "
        "first step has rate 0 and a fraction is rounded up.",
    )
    decay: Length = Field(
        default=0.1, description="Length of the final decay of wsd; other schedules ignore it."
    )
    final_fraction: Number = Field(
        default=0.0, ge=0, le=1, description="Final learning rate as a fraction of the peak."
    )


class MemorySettings(Section):
    """The device, memory limits, and placement of data in memory."""

    device: Annotated[
        str, BeforeValidator(read_device), TypeName("auto, cpu, cuda, cuda:N or xpu")
    ] = Field(
        default="auto",
        description="Device for compute; auto is the accelerator if there is one, else cpu.",
    )
    vram: Size = Field(
        default="auto", description="Most device memory to use; auto is all free memory."
    )
    ram: Size = Field(
        default="auto",
        description="Most host memory to use; auto is all free memory within the limits of the "
        "control group.",
    )
    disk: Annotated[Name | None, TypeName("folder or null")] = Field(
        default=None,
        description="Folder on a fast disk for a scratch file, which the plan uses for runs that "
        "do not fit into host memory: between updates it holds master remainders and optimizer "
        "states, and gradients where memory is shortest; null uses no disk.",
    )
    disk_bytes: Size = Field(
        default="auto",
        description="Most bytes of the scratch file in memory.disk; auto is all free space.",
    )
    slots: SlotCount = Field(
        default="auto",
        description="Number of device buffers for block weights; two are enough to overlap.",
    )
    tape: Literal["auto", "device", "host"] = Field(
        default="auto", description="Where block inputs are kept between forward and backward."
    )
    chunk_tokens: Annotated[
        int | Literal["auto"],
        PlainValidator(or_auto(read_tokens)),
        TypeName("tokens, like 4096 or 4k, or auto"),
    ] = Field(
        default="auto",
        description="Number of tokens whose logits exist at a time; auto is at most 4096.",
    )
    tile_tokens: OptionalTokens = Field(
        default="auto",
        description="Number of tokens that a layer computes at a time, but for its attention; "
        "null computes full rows.",
    )
    kept_layers: LayerCount = Field(
        default="auto",
        description="Number of top layers whose activations stay in device memory from forward to "
        "backward, so that backward does not compute them again; auto is as many as fit, if that "
        "is faster, and 0 on a machine that `megatrain doctor` has not measured.",
    )


class Config(Section):
    """Every setting of a run."""

    model: Annotated[ModelSettings, short(SHORT_FORMS["model"])]
    data: Annotated[DataSettings, short(SHORT_FORMS["data"])]
    lora: LoraSettings = Field(default_factory=LoraSettings)
    loss: Annotated[LossSettings, short(SHORT_FORMS["loss"])] = Field(default_factory=LossSettings)
    train: TrainSettings = Field(default_factory=lambda: TrainSettings.model_validate({}))
    optim: OptimSettings = Field(default_factory=OptimSettings)
    memory: Annotated[MemorySettings, retired("gather_embedding", "since 0.2 the plan chooses")] = (
        Field(default_factory=MemorySettings)
    )
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
        if isinstance(value, Mapping):  # the keys of a section may all be commented out
            empty = {key for key in cls.model_fields if value.get(key, key) is None}
            value = {key: section for key, section in value.items() if key not in empty}
        try:
            config = handler(value)
        except ValidationError as error:
            faults = faults_of(error, document, FIELDS)
            raise refusal(document, faults, error.error_count()) from None
        found = conflicts(config)
        if found:
            raise refusal(document, sorted(found, key=lambda fault: document.line(fault.path)))
        return config

    @property
    def step_tokens(self) -> int | None:
        """Most tokens of a step, as far as is known without the data; None: the plan decides."""
        if self.train.batch_tokens == "auto":
            return None
        return self.train.batch_tokens or (self.train.batch_rows or 1) * self.data.max_length

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

    def decided(self, *, packing: bool, learning_rate: float | None = None) -> Config:
        """Return the config with these choices where it has `auto`; None leaves the rate open."""
        data, optim = dict(self.data), dict(self.optim)
        if self.data.packing == "auto":
            data["packing"] = packing
        if self.optim.learning_rate == "auto" and learning_rate is not None:
            optim["learning_rate"] = learning_rate
        return Config.model_validate({**dict(self), "data": data, "optim": optim})

    @property
    def run_dir(self) -> str:
        """The run folder: save.dir, or one named after the model."""
        last = self.model.name_or_path.rstrip("/").rpartition("/")[2]
        return self.save.dir or f"runs/{last or 'run'}"

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
}
"""The keys of each mapping."""
