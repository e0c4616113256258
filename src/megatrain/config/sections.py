"""The sections of a config: every key, its meaning, its unit and its default.

Values are plain and immutable. `auto` stays `auto` here; the plan decides it. The descriptions are
the reference: docs/config.md is written from them. settings.py has the config as a whole, and what
settings of different sections exclude.

Law (tests/run/test_settings_are_read.py): every key is read by the program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    model_serializer,
    model_validator,
)

from megatrain.choices import BaseForm, Divergence, PreferenceFormat, RowFormat, StateDtype
from megatrain.config.quantities import or_auto, read_number, read_tokens
from megatrain.config.value_types import (
    AlphaPattern,
    Arguments,
    Beta,
    Cadence,
    Columns,
    Experts,
    LayerCount,
    Length,
    Name,
    NewTokens,
    Number,
    OptionalTokens,
    PageCount,
    Patterns,
    ProcessorArguments,
    RankPattern,
    Rate,
    Roles,
    RunPlace,
    Seconds,
    Seed,
    Size,
    SlotCount,
    StepCount,
    Switch,
    TemplateArguments,
    TemplateSetting,
    TokenCount,
    TypeName,
    Whole,
    as_list,
    read_device,
)

_Positive = Annotated[Annotated[Number, Field(gt=0)] | None, TypeName("number or null")]


class Section(BaseModel):
    """Settings that belong together."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False)


def short(key: str) -> BeforeValidator:
    """Accept one word for a section, as the value of `key`."""
    return BeforeValidator(lambda value: {key: value} if isinstance(value, str) else value)


class RopeSettings(Section):
    """Scaling of rotary positions, as in `rope: {type: yarn, factor: 4.0}`."""

    type: Literal["default", "linear", "yarn", "llama3"] = Field(
        description="Kind of scaling, by its name in transformers; one that the model declares "
        "cannot change; default scales nothing, for training beyond the positions on purpose."
    )
    factor: Annotated[Number, Field(ge=1)] = Field(
        description="How many times as many positions as before any scaling; a model with factor 8 "
        "gets twice its positions by 16."
    )
    theta: _Positive = Field(
        default=None, description="Base of the frequencies; null is the model's."
    )
    original_max_position_embeddings: Annotated[TokenCount | None, TypeName("tokens or null")] = (
        Field(
            default=None,
            description="Positions before any scaling; null is as the model declares (Qwen3 says "
            "40960, and its makers scale from 32768).",
        )
    )

    @model_serializer
    def _given(self) -> dict[str, Any]:
        return {key: value for key, value in self if value is not None}

    def parameters(self) -> dict[str, Any]:
        """Return what is given, by the names of transformers."""
        renamed = {"type": "rope_type", "theta": "rope_theta"}
        return {renamed.get(key, key): value for key, value in self.model_dump().items()}


Rope = Annotated[
    RopeSettings | None,
    TypeName("mapping, like {type: yarn, factor: 4.0}, or null"),
]


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
    base: BaseForm = Field(
        default="auto",
        description="Form of the frozen model under adapters in host memory and on the link; the "
        "device widens it; as_published keeps a quantized folder as it is, to the bits of loading "
        "it dequantized; nf4 (as QLoRA) rounds linear layers and experts on load; auto is "
        "as_published for a quantized folder, else bf16.",
    )
    frozen: Patterns = Field(
        default=(),
        description="Params that are not trained, like model.embed_*; a pattern without a match "
        "is an error.",
    )
    media: Literal["auto", "frozen", "projector", "all"] = Field(
        default="auto",
        description="What is trained of a joint model's towers if rows have images or sound: "
        "nothing, the projector between a tower and text, or all; auto is projector, and with "
        "adapters frozen.",
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


class DataSource(Section):
    """Rows from one place."""

    path: Name = Field(description="File, folder or Hub id of a dataset.")
    name: Annotated[Name | None, TypeName("name or null")] = Field(
        default=None,
        description="Which configuration of a dataset on the Hub, like main of openai/gsm8k; null "
        "is its default.",
    )
    split: Annotated[Name | None, TypeName("name or null")] = Field(
        default=None,
        description="Which split of a dataset, or a part of it, like train[:1000] or train[:10%]; "
        "files have the split train, and null is train.",
    )
    revision: Annotated[Name | None, TypeName("branch, tag or commit, or null")] = Field(
        default=None, description="Which version of a dataset on the Hub; null is main."
    )
    format: RowFormat = Field(
        default="auto",
        description="How a row is written; auto detects it and prints what was found.",
    )
    columns: Columns = Field(
        default=Arguments(),
        description="Our name of a column and its name in the file, in any case; a.b is b inside "
        "of a, and role and content are keys of a turn; plain names like Question and Answer are "
        "found without it.",
    )
    roles: Roles = Field(
        default=Arguments(),
        description="Our role (system, user, assistant, tool), and the name in the file, or a list "
        "of names, for names that are not known.",
    )
    rows: Annotated[Annotated[Whole, Field(ge=1)] | None, TypeName("whole number or null")] = Field(
        default=None, description="Read so many rows, from the first; null reads all."
    )
    media: Annotated[Name | None, TypeName("folder or null")] = Field(
        default=None,
        description="Folder with the images and sounds that rows name; null is the folder of the "
        "rows, and nothing outside of it is read.",
    )
    weight: Number = Field(
        default=1.0,
        gt=0,
        description="How many times each of its rows comes in an epoch; 1 everywhere is plain "
        "concatenation, 0.5 takes another half of the rows in each epoch.",
    )
    share: Annotated[Annotated[Number, Field(gt=0)] | None, TypeName("number or null")] = Field(
        default=None,
        description="Its part of the tokens of an epoch, relative to the shares of the other "
        "sources, like 0.7 beside 0.3; all sources have one, or none, and weight is then not "
        "given.",
    )
    dtype: Annotated[
        Literal["uint16", "uint32", "int32"] | None,
        TypeName("uint16, uint32, int32 or null"),
    ] = Field(
        default=None,
        description="How ids are written in a .bin file of tokens; null reads it from the file's "
        "header or from the .idx beside it.",
    )
    eos: Annotated[Annotated[Whole, Field(ge=0)] | None, TypeName("token id or null")] = Field(
        default=None,
        description="Id that ends a document in .bin and .npy files of tokens; null is the "
        "tokenizer's end-of-sequence token.",
    )


def _places(value: object) -> object:
    """Return the places as a list; refuse rows, of which each would be a separate fault."""
    if isinstance(value, Iterable) and not isinstance(value, str | Mapping | list | tuple):
        raise ValueError(_ROWS)
    if isinstance(value, list | tuple) and value and all(map(_is_row, value)):
        raise ValueError(_ROWS)
    return as_list(value)


def _is_row(value: object) -> bool:
    return isinstance(value, Mapping) and bool(value.keys() & _COLUMNS)


_COLUMNS = {
    "messages", "conversations", "text", "prompt", "completion", "instruction", "output", "query",
    "response", "question", "answer", "chosen", "rejected",
}  # fmt: skip
_ROWS = (
    "give files, folders or Hub ids, not rows. Rows go to mt.Trainer as train_dataset, or into a "
    "file, one JSON object a line"
)
Sources = Annotated[
    tuple[Annotated[DataSource, short("path")], ...],
    BeforeValidator(_places),
    Field(min_length=1),
]


def _eval_kind(value: object) -> str:
    if isinstance(value, str):
        try:
            read_number(value)
        except ValueError:
            return "sources"
    return "sources" if isinstance(value, Iterable) else "fraction"


Eval = Annotated[
    Annotated[Annotated[Number, Field(gt=0, lt=1)] | None, Tag("fraction")]
    | Annotated[Sources, Tag("sources")],
    Discriminator(_eval_kind),
    TypeName("fraction, path or list of paths or {path, name, split, ...}, or null"),
]


class DataSettings(Section):
    """Training and evaluation rows."""

    train: Annotated[Sources, TypeName("path, or list of paths or {path, name, split, ...}")] = (
        Field(description="Sources of the training rows.")
    )
    eval: Eval = Field(
        default=None,
        description="Rows to evaluate on: a fraction held out of train, or separate sources.",
    )
    max_length: TokenCount = Field(
        default=2048,
        description="Maximum length of a row; by default no more than train.batch_tokens.",
    )
    overlong: Literal["drop", "truncate", "split"] = Field(
        default="drop", description="Treatment of longer rows; they are counted and reported."
    )
    train_on: Literal["assistant", "last", "completion", "all"] = Field(
        default="assistant",
        description="Which tokens are targets: every assistant turn, only the last one, everything "
        "after the prompt, or every token.",
    )
    template_kwargs: TemplateArguments = Field(
        default=Arguments(),
        description="Arguments for the chat template; chat_template_kwargs of a row override them.",
    )
    chat_template: TemplateSetting = Field(
        default=None,
        description="Replaces the tokenizer's template: a file, the text of a template, or none, "
        "which joins prompt and completion unchanged.",
    )
    max_bad: Annotated[Number, Field(ge=0, le=1)] = Field(
        default=0.01,
        description="Share of the rows that may be bad (broken, empty, refused by the chat "
        "template) and skipped; more is an error.",
    )
    max_dropped: Annotated[Number, Field(ge=0, le=1)] = Field(
        default=0.2,
        description="Share of the rows that may be dropped because of their length or because they "
        "have nothing to train on; more is an error.",
    )
    max_lost_thoughts: Annotated[Number, Field(ge=0, le=1)] = Field(
        default=0.01,
        description="Share of the rows that may be trained without the thought of an answer, "
        "because the chat template leaves it out; more is an error.",
    )
    processor_kwargs: ProcessorArguments = Field(
        default=Arguments(),
        description="Arguments for the model's processor, like the sizes of images.",
    )
    packing: Switch = Field(
        default="auto",
        description="Put several rows into one sequence, where they never attend to each other; "
        "auto does so if the model's family keeps them apart, and a resumed run keeps what it "
        "has.",
    )
    shuffle: bool = Field(
        default=True,
        description="Shuffle the rows in each epoch; false keeps the order of the files, one "
        "source after another.",
    )
    seed: Seed = Field(
        default=42, description="Seed for the order of rows and the held-out fraction."
    )


class LoraSettings(Section):
    """Low-rank adapters, trained instead of the model; `rank` or `path` turns them on."""

    rank: Annotated[Annotated[Whole, Field(ge=1)] | None, TypeName("whole number or null")] = Field(
        default=None, description="Rank of the adapters; null trains the model itself."
    )
    alpha: _Positive = Field(
        default=None,
        description="Adapters are scaled by alpha / rank; null is twice the rank.",
    )
    path: Annotated[Name | None, TypeName("path or null")] = Field(
        default=None,
        description="Folder of adapters to start from, as PEFT or an export writes it; rank, alpha "
        "and modules are then those of the folder, and dropout is the one given here.",
    )
    dropout: Annotated[Number, Field(ge=0, lt=1)] = Field(
        default=0.0, description="Dropout of the adapters' inputs."
    )
    targets: Patterns = Field(
        default=(),
        description="Linear modules of the decoder layers to adapt, by the end of their names, "
        "like [q_proj, v_proj], or by patterns, like *.mlp.*; all of them if none is given, or "
        "all-linear.",
    )
    experts: Experts = Field(
        default=(),
        description="Adapters for experts that share one tensor too: true for all of them, or "
        "names of params, like [experts.down_proj], as in PEFT's target_parameters.",
    )
    rank_pattern: RankPattern = Field(
        default=Arguments(),
        description="Other ranks for some of them, by their names, ends of names or patterns; the "
        "first that matches counts, and a name without a match is an error.",
    )
    alpha_pattern: AlphaPattern = Field(
        default=Arguments(), description="Other alphas for some of them, in the same way."
    )
    rslora: bool = Field(
        default=False, description="Scale by alpha / sqrt(rank) instead, for high ranks."
    )
    modules_to_save: Patterns = Field(
        default=(),
        description="Modules that are trained whole and saved with the adapters, like "
        "[embed_tokens, lm_head]; model.add_tokens needs these.",
    )
    dora: bool = Field(
        default=False,
        description="Train the magnitude of each row of a weight besides (DoRA); linear modules "
        "alone.",
    )
    dtype: Literal["auto", "fp32"] = Field(
        default="auto",
        description="Adapters are computed in the dtype of the model, or in fp32 as PEFT does.",
    )


LossName = Literal[
    "next_token", "dpo", "ipo", "orpo", "simpo", "apo_zero", "robust", "kto",
    "grpo", "dr_grpo", "dapo", "gspo", "cispo", "distill",
]  # fmt: skip
REWARDED: tuple[LossName, ...] = ("grpo", "dr_grpo", "dapo", "gspo", "cispo")
"""Losses of answers that the model draws, by rewards for them."""
TOP_K = 64
"""Tokens of a teacher that are kept of each trained token, unless the config says otherwise."""
_LOSS_KEYS = {
    "beta": ("dpo", "ipo", "orpo", "simpo", "apo_zero", "robust", "kto"),
    "label_smoothing": ("next_token", "dpo", "simpo", "robust"),
    "gamma": ("simpo",),
    "sft": ("dpo", "ipo", "simpo", "apo_zero", "robust"),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "clip": ("grpo", "dr_grpo", "dapo", "gspo"),
    "clip_high": REWARDED,
    "kl": REWARDED,
    "teacher": ("distill",),
    "teacher_revision": ("distill",),
    "temperature": ("distill",),
    "divergence": ("distill",),
    "top_k": ("distill",),
}
"""Keys, and the losses that read them."""
COMPARED: dict[LossName, PreferenceFormat] = {
    "dpo": "pairs",
    "ipo": "pairs",
    "orpo": "pairs",
    "simpo": "pairs",
    "apo_zero": "pairs",
    "robust": "pairs",
    "kto": "kto",
}
"""The preferences that a loss compares; others train on rows without."""


class LossSettings(Section):
    """The loss."""

    name: LossName = Field(
        default="next_token",
        description="What is minimized: next_token is fine-tuning; dpo, ipo, orpo, simpo, apo_zero "
        "and robust prefer the chosen of two answers; kto takes answers that are each good or bad; "
        "grpo, dr_grpo, dapo, gspo and cispo train on rewards for answers that the model draws; "
        "distill learns the probabilities of a teacher.",
    )
    beta: _Positive = Field(
        default=None,
        description="Strength of a preference: how far the model may move from the reference (dpo, "
        "ipo, apo_zero, robust, kto: a small one lets it move further), share of the odds ratio "
        "(orpo), scale of the rewards (simpo); null is 0.1, and 2.0 for simpo.",
    )
    label_smoothing: Annotated[
        Annotated[Number, Field(ge=0, lt=0.5)] | None, TypeName("number below 0.5, or null")
    ] = Field(
        default=None,
        description="dpo, simpo, robust: probability that a pair is the wrong way round "
        "(next_token: share of the loss that is the mean over the vocabulary); null is 0, and 0.1 "
        "for robust.",
    )
    gamma: Annotated[Annotated[Number, Field(ge=0)] | None, TypeName("number or null")] = Field(
        default=None,
        description="simpo: margin by which the reward of the chosen answer is to be larger; null "
        "is 1.0.",
    )
    sft: _Positive = Field(
        default=None,
        description="dpo, ipo, simpo, apo_zero, robust: weight of the chosen answer's own loss per "
        "token, beside the preference; null is 0.",
    )
    desirable_weight: _Positive = Field(
        default=None, description="kto: weight of good answers; null is 1."
    )
    undesirable_weight: _Positive = Field(
        default=None, description="kto: weight of bad answers; null is 1."
    )
    clip: Annotated[
        Annotated[Number, Field(gt=0, lt=1)] | None, TypeName("number below 1, or null")
    ] = Field(
        default=None,
        description="grpo, dr_grpo, dapo, gspo: how far a probability may fall below that at which "
        "an answer was drawn before it counts no more; null is 0.2, and 3e-4 for gspo.",
    )
    clip_high: _Positive = Field(
        default=None,
        description="grpo, dr_grpo, dapo, gspo: how far it may rise above; null is clip, 0.28 for "
        "dapo and 4e-4 for gspo; cispo: most that a ratio of both counts; null is 5.",
    )
    kl: _Positive = Field(
        default=None,
        description="grpo, dr_grpo, dapo, gspo, cispo: weight of the distance to the model as it "
        "began: without its adapters, or a second copy in host memory; null is 0.",
    )
    teacher: Annotated[Name | None, TypeName("folder or Hub id, or null")] = Field(
        default=None,
        description="distill: the model to learn from, of the same vocabulary; it goes through all "
        "rows before the first step, and is out of memory then.",
    )
    teacher_revision: Annotated[Name | None, TypeName("branch, tag or commit, or null")] = Field(
        default=None, description="distill: revision of a teacher on the Hub; null is main."
    )
    temperature: _Positive = Field(
        default=None,
        description="distill: divides the logits of both models; null is 1.",
    )
    divergence: Annotated[Divergence | None, TypeName("forward, reverse, jsd or null")] = Field(
        default=None,
        description="distill: what is minimized, KL(teacher, student), KL(student, teacher) or the "
        "mean of both to their mixture; null is forward.",
    )
    top_k: Annotated[Annotated[int, Field(ge=1)] | None, TypeName("integer or null")] = Field(
        default=None,
        description="distill: likeliest tokens of the teacher that are kept of each trained token, "
        "8 bytes each on disk; all others count as one more; null is 64.",
    )

    @model_validator(mode="after")
    def _read_by_name(self) -> Self:
        given = [key for key in _LOSS_KEYS if getattr(self, key) is not None]
        for key in given:
            if self.name not in _LOSS_KEYS[key]:
                names = " and ".join(_LOSS_KEYS[key])
                raise ValueError(f"{key} belongs to {names}, and the loss is {self.name}")
        if self.name == "distill" and self.teacher is None:
            raise ValueError("distill needs a teacher: the folder or Hub id of a model")
        return self

    @property
    def preferences(self) -> PreferenceFormat | None:
        """The format of the rows that the loss compares; None: it compares none."""
        return COMPARED.get(self.name)

    @property
    def draws(self) -> bool:
        """Whether the model draws the answers that it is trained on."""
        return self.name in REWARDED


class RolloutSettings(Section):
    """Answers that the model draws, to be trained on by their rewards."""

    samples: Whole = Field(
        default=8,
        ge=2,
        description="Answers to each prompt, which are compared with each other; a step has "
        "train.batch_rows prompts.",
    )
    max_new_tokens: TokenCount = Field(
        default=256,
        description="Maximum tokens of an answer; prompt and answer have data.max_length at most.",
    )
    temperature: Number = Field(
        default=1.0,
        gt=0,
        description="Temperature to draw at; the loss divides the logits by it too, as TRL does.",
    )
    iterations: Whole = Field(
        default=1, ge=1, description="Optimizer steps on the same answers, before new ones."
    )
    mask_truncated: bool = Field(
        default=False,
        description="Leave answers that were cut off at max_new_tokens out of training; their "
        "rewards still count in the mean of their prompt.",
    )
    engine: Literal["own", "vllm"] = Field(
        default="own",
        description="Who draws: own is the engine that trains, between its steps; vllm is a vLLM "
        "server, which gets the weights before each draw.",
    )
    server: Annotated[Name | None, TypeName("address or null")] = Field(
        default=None,
        description="vllm: address of a server that runs already, like http://127.0.0.1:8000; null "
        "starts one on this host.",
    )
    weights_folder: Annotated[Name | None, TypeName("folder or null")] = Field(
        default=None,
        description="vllm: folder through which the server gets the weights, which both hosts "
        "have under this name; null is /dev/shm, for a server on this host.",
    )


_ONE_OF_TWO = (("epochs", "steps", 1), ("batch_tokens", "batch_rows", "auto"))
"""Keys of which one is given, and the default of the first."""


class TrainSettings(Section):
    """Length of the run and size of its steps."""

    epochs: _Positive = Field(
        default=None, description="Passes over the data; 1 if neither epochs nor steps is given."
    )
    steps: Annotated[StepCount | None, TypeName("steps or null")] = Field(
        default=None, description="Optimizer steps of the run, instead of epochs."
    )
    batch_tokens: OptionalTokens = Field(
        default="auto",
        description="Tokens of one optimizer step, regardless of the number of micro-batches; auto "
        "is 32768 in whole rows of data.max_length, fewer where an epoch would have less than 50 "
        "steps, and the same on every machine; a resumed run keeps its number.",
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
    max_grad_norm: _Positive = Field(
        default=1.0,
        description="Global gradient norm to clip to; null does not clip and updates weights "
        "during backward, which saves 2 bytes per parameter.",
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
        "so on an accelerator, unless layers have Liger's kernels or run over tiles.",
    )
    kernels: Literal["auto", "none", "liger"] = Field(
        default="auto",
        description="Fused kernels for norms, rotary positions and feed-forward on an accelerator, "
        "which change the last bits; auto takes liger where the package liger-kernel is installed "
        "and knows the model, none is the model's own code.",
    )
    products: Literal["plain", "fp8"] = Field(
        default="plain",
        description="How linear modules of layers multiply: plain is the model's own code in its "
        "dtype; fp8 takes 8-bit inputs, weights and gradients, which NVIDIA's cards from Ada on "
        "multiply twice as fast; it changes results (numerics.md has by how much), and masters "
        "stay fp32.",
    )
    deterministic: bool = Field(
        default=False,
        description="Only kernels that give the same bits each time they run: a run on a GPU then "
        "repeats, and resumes, bit for bit; slower, and an error where torch has no such kernel.",
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


class GroupSettings(Section):
    """Params with a learning rate or a decay of their own."""

    params: Patterns = Field(description="Names; a pattern without a trained match is an error.")
    learning_rate: Annotated[Number | None, TypeName("number or null")] = Field(
        default=None, gt=0, le=1, description="Peak learning rate; null is optim.learning_rate."
    )
    times: Number = Field(
        default=1.0,
        gt=0,
        description="Factor on the learning rate, in place of a number of its own; LoRA+ has 16 "
        "for *lora_B*.",
    )
    weight_decay: Annotated[Number | None, TypeName("number or null")] = Field(
        default=None,
        ge=0,
        description="Decay of all of them; null is optim.weight_decay for matrices.",
    )


class OptimSettings(Section):
    """The optimizer and its learning rate."""

    name: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="The optimizer; muon is for the matrices of layers, with AdamW for embeddings, "
        "output projection, norms and biases, at the same learning rate.",
    )
    learning_rate: Rate = Field(
        default="auto",
        description="Peak learning rate; auto is 1e-5 for fine-tuning and 1e-6 for preferences, "
        "with adapters ten times as much; a resumed run keeps its number.",
    )
    betas: Annotated[tuple[Beta, Beta], TypeName("two numbers")] = Field(
        default=(0.9, 0.999), description="Decay rates of the first and second moment."
    )
    eps: Number = Field(default=1e-8, gt=0, description="Added to the root of the second moment.")
    momentum: Number = Field(
        default=0.95,
        ge=0.5,
        lt=1,
        description="Decay rate of the momentum of muon; adamw ignores it.",
    )
    weight_decay: Number = Field(
        default=0.0,
        ge=0,
        description="Decoupled weight decay; norms and biases do not decay.",
    )
    groups: Annotated[tuple[GroupSettings, ...], TypeName("list of groups")] = Field(
        default=(),
        description="Params with a learning rate or a decay of their own: "
        "{params: [patterns], learning_rate: ..., times: ..., weight_decay: ...}.",
    )
    state: StateDtype = Field(
        default="fp32",
        description="Precision of the moments: 8, 4 or 2.03 bytes per parameter beside fp32 "
        "masters, half of that for matrices of muon; never chosen by the machine, and a resumed "
        "run keeps the one it has unless another is given.",
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
    slots: SlotCount = Field(
        default="auto",
        description="Number of device buffers for block weights; two are enough to overlap; auto "
        "has none where device and host are one memory.",
    )
    expert_pages: PageCount = Field(
        default="auto",
        description="Number of parts in which the experts of a layer visit the device while it "
        "computes; 1 fetches a layer whole; auto is 1 where layers fit.",
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

    def conflicts(self, *, compiles: bool) -> Iterator[tuple[str, str]]:
        """Yield the keys that contradict others, each with what to do."""
        tile, kept = self.tile_tokens, self.kept_layers
        if compiles and isinstance(tile, int):
            yield (
                "tile_tokens",
                f"memory.tile_tokens is {tile} and train.compile is true: a compiled layer "
                "computes full rows. Set memory.tile_tokens to null, or train.compile to false.",
            )
        pages = self.expert_pages
        if compiles and isinstance(pages, int) and pages > 1:
            yield (
                "expert_pages",
                f"memory.expert_pages is {pages} and train.compile is true: a compiled layer reads "
                "its experts at once. Set memory.expert_pages to 1, or train.compile to false.",
            )
        if isinstance(kept, int) and kept > 0 and isinstance(tile, int):
            yield (
                "kept_layers",
                f"memory.kept_layers is {kept} and memory.tile_tokens is {tile}: layers run over "
                "tiles to hold less, and compute each tile again. Set memory.tile_tokens to null, "
                "or memory.kept_layers to 0.",
            )


class EvalSettings(Section):
    """Evaluation during the run."""

    every: Annotated[StepCount | None, TypeName("steps or null")] = Field(
        default=200,
        description="Steps between evaluations; null evaluates before the first step and after the "
        "last one only.",
    )
    samples: Whole = Field(
        default=4,
        ge=0,
        le=1000,
        description="Number of texts to generate before the first step, at each evaluation and "
        "after the last step; without data.eval only first and last; the plan shows the cost.",
    )
    max_rows: Annotated[Annotated[Whole, Field(ge=1)] | None, TypeName("rows or null")] = Field(
        default=None, description="Maximum rows to evaluate on; null is all."
    )
    patience: Annotated[Annotated[Whole, Field(ge=1)] | None, TypeName("evaluations or null")] = (
        Field(
            default=None,
            description="Stop after this many evaluations in a row without a lower loss, and "
            "export the best checkpoint, as with save.best; null never stops early.",
        )
    )


class SaveSettings(Section):
    """The run folder and its checkpoints."""

    dir: Annotated[RunPlace | None, TypeName("path, URL or null")] = Field(
        default=None,
        description="Run folder, or URL of a run in a bucket, like s3://bucket/name; null is runs/ "
        "plus the last part of the model's name.",
    )
    every: Annotated[Cadence | None, TypeName("steps, time like 30min, or null")] = Field(
        default=500, description="Steps or time between checkpoints; null saves at the end only."
    )
    notice: Annotated[Seconds | None, TypeName("time, like 30s, or null")] = Field(
        default=None,
        description="Time from SIGTERM to the end of the machine; the run leaves its step, saves "
        "and ends within it, and null finishes the step first.",
    )
    keep: Whole = Field(default=2, ge=1, description="Checkpoints to keep; older ones are deleted.")
    best: bool = Field(
        default=False,
        description="Also save when an evaluation is the best so far, keep that checkpoint, and "
        "export it at the end instead of the last one.",
    )


class LogSettings(Section):
    """Logging."""

    every: StepCount = Field(default=1, description="Steps between log lines.")
    to: Annotated[
        tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...],
        BeforeValidator(as_list),
        TypeName("list of tensorboard, wandb, trackio, mlflow"),
    ] = Field(default=(), description="Where to send metrics in addition to metrics.jsonl.")
    project: Annotated[Name | None, TypeName("name or null")] = Field(
        default=None,
        description="Project of wandb and trackio, experiment of mlflow; null is that of "
        "WANDB_PROJECT, TRACKIO_PROJECT or MLFLOW_EXPERIMENT_NAME, or else megatrain.",
    )
