"""The types of settings: how a value is read, and its name in docs/config.md."""

from __future__ import annotations

import ipaddress
import json
import re
import urllib.parse
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NoReturn

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator

from megatrain.choices import ALL_EXPERTS, COLUMNS
from megatrain.config.quantities import (
    or_auto,
    read_bytes,
    read_cadence,
    read_length,
    read_number,
    read_rate,
    read_seconds,
    read_switch,
    read_tokens,
    read_whole,
)
from megatrain.files import is_too_long
from megatrain.places import is_url


def is_loopback(address: str) -> bool:
    """Return whether an address of a server is one of this host, which no other reaches."""
    try:
        found = urllib.parse.urlsplit(address)
        host, _ = found.hostname or "", found.port
        return found.scheme == "http" and (
            host == "localhost" or ipaddress.ip_address(host).is_loopback
        )
    except ValueError:
        return False


class TypeName(str):
    """The name of a type in docs/config.md."""

    __slots__ = ()


def _path(value: object) -> object:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ValueError("give a path or a name")
    if is_too_long(value):
        raise ValueError("give a path or a name of at most 255 bytes between slashes")
    return value.removeprefix("hf://datasets/").removeprefix("hf://")


def _run_place(value: object) -> object:
    """Check that a run can be kept there: a path, or a URL of a place with conditional puts."""
    if isinstance(value, str) and "://" in value and not is_url(value):
        scheme = value.partition("://")[0]
        raise ValueError(
            f"a run cannot be kept in {scheme[:20]}://; give a folder, s3://bucket/name, "
            "gs://bucket/name, az://container/name or file:///folder"
        )
    return value


def as_list(value: object) -> object:
    """Return a single value as a list."""
    return [value] if isinstance(value, str | Mapping) else value


def read_experts(value: object) -> object:
    """Return names of params; true stands for those of all experts."""
    if isinstance(value, bool):
        return [ALL_EXPERTS] if value else []
    return as_list(value)


ACCELERATOR_TYPES = {"cuda", "xpu"}
"""Their names in torch. A program that gives torch another type of device adds its name."""


def read_device(value: object) -> object:
    """Return the name of a device. Raises ValueError."""
    name, _, number = value.partition(":") if isinstance(value, str) else ("", "", "")
    numbered = name in ACCELERATOR_TYPES and number.isdecimal() and len(number) < 4
    if name not in {"auto", "cpu"} | ACCELERATOR_TYPES or (value != name and not numbered):
        raise ValueError("give auto, cpu, cuda, cuda:1 or xpu")
    return value


def _tokens_or_null(value: object) -> int | str | None:
    return None if value is None else or_auto(read_tokens)(value)


_RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message")


class Arguments(dict[str, Any]):
    """An immutable, hashable mapping."""

    __slots__ = ()

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(json.dumps(self, sort_keys=True, default=str))

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("a config is immutable")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[Arguments], tuple[dict[str, Any]]]:
        return Arguments, (dict(self),)


def read_arguments(value: object) -> Arguments:
    """Return arguments for a chat template. Raises ValueError."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError("give a mapping, like {enable_thinking: false}")
    for name in value:
        if name in _RESERVED:
            raise ValueError(f"{name} is not an argument that can be set")
    return Arguments(value)


def read_processor_arguments(value: object) -> Arguments:
    """Return arguments for a processor: those for images and for sound. Raises ValueError."""
    kinds = ("images_kwargs", "audio_kwargs")
    if not isinstance(value, Mapping) or not all(
        isinstance(one, Mapping) for one in value.values()
    ):
        raise ValueError("give a mapping, like {images_kwargs: {do_resize: false}}")
    for name in value:
        if name not in kinds:
            raise ValueError(f"{name} cannot be set; the names here are {', '.join(kinds)}")
    return Arguments(value)


def read_columns(value: object) -> Arguments:
    """Return a file's names for our columns. Raises ValueError."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise ValueError("give a mapping, like {prompt: Question, completion: Answer}")
    for ours, theirs in value.items():
        if ours not in COLUMNS:
            repair = f"the names here are {', '.join(COLUMNS)}"
            if theirs in COLUMNS:
                repair = f"our name comes first: {theirs}: {ours}"
            raise ValueError(f"{ours} is not a column of ours; {repair}")
        if not isinstance(theirs, str) or not theirs.strip():
            raise ValueError(f"{ours} needs the name of a column of the file")
    if twice := {name for name in value.values() if [*value.values()].count(name) > 1}:
        raise ValueError(f"{', '.join(sorted(twice))} cannot be two columns")
    return Arguments(value)


_OUR_ROLES = ("system", "user", "assistant", "tool")


def read_roles(value: object) -> Arguments:
    """Return a file's names for our roles, each as a tuple. Raises ValueError."""
    if not isinstance(value, Mapping):
        raise ValueError("give a mapping, like {user: Customer, assistant: Agent}")
    found = {}
    for ours, theirs in value.items():
        names = theirs if isinstance(theirs, list | tuple) else [theirs]
        if ours not in _OUR_ROLES:
            raise ValueError(f"{ours} is not a role; the roles are {', '.join(_OUR_ROLES)}")
        if not names or not all(isinstance(name, str) and name.strip() for name in names):
            raise ValueError(f"{ours} needs the name of a role of the file, or a list of them")
        found[ours] = tuple(name.strip() for name in names)
    names = [name.lower() for theirs in found.values() for name in theirs]
    if len(set(names)) < len(names):
        raise ValueError("a role of the file can be one of ours, and one is there twice")
    return Arguments(found)


def read_template(value: object) -> str | None:
    """Return a file, a template or `none`; the user of the value decides which it is."""
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise ValueError("give a file, the text of a template, or none")
    return value


Number = Annotated[float, BeforeValidator(read_number), TypeName("number")]
Whole = Annotated[int, BeforeValidator(read_whole), TypeName("whole number")]
SlotCount = Annotated[
    int | Literal["auto"],
    PlainValidator(or_auto(read_whole, least=2)),
    TypeName("whole number or auto"),
]
PageCount = Annotated[
    int | Literal["auto"],
    PlainValidator(or_auto(read_whole, least=1)),
    TypeName("whole number or auto"),
]
LayerCount = Annotated[
    int | Literal["auto"],
    PlainValidator(or_auto(read_whole, least=0)),
    TypeName("whole number or auto"),
]
TokenCount = Annotated[int, BeforeValidator(read_tokens), TypeName("tokens, like 2048 or 128k")]
OptionalTokens = Annotated[
    int | Literal["auto"] | None,
    PlainValidator(_tokens_or_null),
    TypeName("tokens, like 2048 or 128k, auto or null"),
]
Length = Annotated[
    int | float, PlainValidator(read_length), TypeName("steps, or fraction of the run")
]
Rate = Annotated[float | Literal["auto"], PlainValidator(read_rate), TypeName("number or auto")]
Switch = Annotated[
    bool | Literal["auto"], PlainValidator(read_switch), TypeName("true, false or auto")
]
StepCount = Annotated[Whole, Field(ge=1), TypeName("steps")]
Cadence = Annotated[int | str, PlainValidator(read_cadence), TypeName("steps, or time like 30min")]
Seconds = Annotated[float, PlainValidator(read_seconds), TypeName("time, like 30s")]
Seed = Annotated[Whole, Field(ge=0, lt=1 << 32)]
Name = Annotated[str, BeforeValidator(_path), TypeName("path or name")]
RunPlace = Annotated[Name, BeforeValidator(_run_place)]
NewTokens = Annotated[tuple[Name, ...], BeforeValidator(as_list), TypeName("list of tokens")]
Patterns = Annotated[tuple[Name, ...], BeforeValidator(as_list), TypeName("list of name patterns")]
Experts = Annotated[
    tuple[Name, ...], BeforeValidator(read_experts), TypeName("true, false or list of names")
]
_PATTERN = re.compile(r"[A-Za-z0-9_.*]{1,500}", re.ASCII)


def _by_name(value: object) -> object:
    """Check that a mapping has names, with a star for any characters, for keys."""
    for key in value if isinstance(value, Mapping) else ():
        if not isinstance(key, str) or _PATTERN.fullmatch(key) is None:
            raise ValueError(f"{str(key)[:80]!r} is not a name; * stands for any characters")
    return value


RankPattern = Annotated[
    dict[str, Annotated[Whole, Field(ge=1)]],
    BeforeValidator(_by_name),
    AfterValidator(Arguments),
    TypeName("mapping, like {down_proj: 64}"),
]
AlphaPattern = Annotated[
    dict[str, Annotated[Number, Field(gt=0)]],
    BeforeValidator(_by_name),
    AfterValidator(Arguments),
    TypeName("mapping, like {down_proj: 128}"),
]
Beta = Annotated[Number, Field(ge=0, lt=1)]
Size = Annotated[
    int | Literal["auto"],
    PlainValidator(or_auto(read_bytes)),
    TypeName("size, like 24GB or 128GiB, or auto"),
]


Columns = Annotated[
    Arguments,
    PlainValidator(read_columns),
    TypeName("mapping, like {prompt: Question, completion: Answer}"),
]
Roles = Annotated[
    Arguments,
    PlainValidator(read_roles),
    TypeName("mapping, like {user: Customer, assistant: Agent}"),
]
TemplateArguments = Annotated[
    Arguments, PlainValidator(read_arguments), TypeName("mapping, like {enable_thinking: false}")
]
ProcessorArguments = Annotated[
    Arguments,
    PlainValidator(read_processor_arguments),
    TypeName("mapping, like {images_kwargs: {do_resize: false}}"),
]
TemplateSetting = Annotated[
    str | None, PlainValidator(read_template), TypeName("file, template, none, or null")
]
