"""`--gpu`: a name as people write it, or a size."""

from __future__ import annotations

import pytest

from megatrain.errors import ConfigError
from megatrain.planning.catalog.asked_machines import find_machine


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("4090", "RTX 4090"),
        ("RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("rtx-3090", "RTX 3090"),
        ("a6000", "RTX A6000"),
        ("H200", "H200"),
        ("GH200", "GH200"),
        ("h100 sxm", "H100 SXM"),
        ("spark", "DGX Spark"),
        ("mi300x", "MI300X"),
        ("5060 Ti", "RTX 5060 Ti 16GB"),
        ("rtx5070ti", "RTX 5070 Ti"),
        ("5080", "RTX 5080"),
        ("b200", "B200"),
    ],
)
def test_names_as_people_write_them(text: str, name: str) -> None:
    assert find_machine(text)[0].name == name
    assert find_machine(text)[1] is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("24GB", "RTX 3090"),
        ("24GiB", "RTX 3090"),
        ("12GB", "RTX 3060 12GB"),
        ("8GB", "RTX 5060"),
        ("16GB", "RTX 5060 Ti 16GB"),
        ("48GB", "RTX A6000"),
        ("80GB", "A100 80GB"),
        ("500GB", "MI300X"),
    ],
)
def test_a_size_means_the_slowest_card_that_has_it(text: str, name: str) -> None:
    machine, size = find_machine(text)
    assert size is not None
    assert machine.name == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100", "could be H100 PCIe or H100 SXM. Give one of them"),
        (
            "potato",
            "unknown. Give the memory of its card, like 8GB: .* Or give one of: RTX 3060 12GB, ",
        ),
        ("24", "Give the memory of its card, like 8GB"),
        ("", "Give the memory"),
    ],
)
def test_what_is_not_understood_is_said(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_machine(text)
