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
        ("2080 Ti", "RTX 2080 Ti"),
        ("GTX 1660 Super", "GTX 1660 Super"),
        ("Tesla T4", "T4"),
        ("RTX 4090 24GB", "RTX 4090"),
        ("4060 Ti 16GB", "RTX 4060 Ti 16GB"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090 Laptop"),
        ("4070 mobile", "RTX 4070 Laptop"),
        ("RTX 6000 Ada", "RTX 6000 Ada"),
        ("RTX PRO 6000 Blackwell", "RTX Pro 6000"),
        ("A100-PCIE-40GB", "A100 40GB"),
        ("none", "CPU"),
        ("no GPU", "CPU"),
        ("cpu", "CPU"),
        ("Apple M4 Max", "CPU"),
        ("m2", "CPU"),
        ("MacBook Pro", "CPU"),
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
        ("8GB", "RTX 3050 8GB"),
        ("16GB", "RTX 4060 Ti 16GB"),
        ("20GB", "RTX A4500"),
        ("48GB", "A40"),
        ("80GB", "A100 80GB"),
        ("500GB", "MI300X"),
    ],
)
def test_a_size_means_the_slowest_card_that_has_it(text: str, name: str) -> None:
    machine, size = find_machine(text)
    assert machine.name == name
    assert machine.bf16
    assert size == int(text[: text.index("G")]) << 30, "cards are sold by powers of two"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100", "could be H100 PCIe or H100 SXM. Give one of them"),
        ("4060 Ti", "could be RTX 4060 Ti 8GB or RTX 4060 Ti 16GB. Give one of them"),
        ("potato", "unknown. Give the memory of its card, like --gpu 8GB: .* --gpu none"),
        ("RX 7900 XTX 24GB", "unknown. Give its memory alone, --gpu 24GB: the slowest known"),
        ("5070 Tie", "unknown. Did you mean RTX 5070 Ti or "),
        ("24", "Give the memory of its card, like --gpu 8GB"),
        ("", "Give the memory"),
    ],
)
def test_what_is_not_understood_is_said(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_machine(text)
