"""Families that Liger's fused kernels are used for by themselves: `train.kernels: auto`.

Nothing is imported to ask: plans are made without torch, and for machines that have the package
where this one has not.

Law (`python -m proofs.liger`, which runs the package itself): in LIGER_FAMILIES losses and
gradients are those of the model's own code within Liger's own tolerance, packed or not.
"""

from __future__ import annotations

from importlib.util import find_spec

LIGER_FAMILIES = frozenset(
    """
    exaone4 gemma gemma2 gemma3_text glm4 granite hunyuan_v1_dense llama ministral mistral olmo2
    olmo3 phi3 qwen2 qwen3 smollm3
    """.split()  # noqa: SIM905
)
"""As of liger-kernel 0.8.5 and transformers 5.22. Mixtures of experts are not among them: their
groups have kernels of their own (models/experts.py)."""
INSTALL = "pip install 'megatrain[kernels]'"


def liger_installed() -> bool:
    """Return whether the package and the compiler of its kernels are installed here."""
    return all(find_spec(name) is not None for name in ("liger_kernel", "triton"))
