"""What others say fits on one GPU, or does not, asked of the planner for our engine."""

from __future__ import annotations

from dataclasses import dataclass

from megatrain.planning.estimate import estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A model on a machine, with the host memory that the source gives."""

    who: str
    model: str
    machine: str
    ram: str
    settings: tuple[str, ...] = ()
    fits: bool = True
    """As published."""

    @property
    def name(self) -> str:
        return f"{self.model} {self.machine} {self.ram} {' '.join(self.settings)}".strip()

    def predicted(self) -> bool:
        """Return whether the planner says that our engine can do it."""
        found = estimate(self.model, self.settings, gpu=self.machine, ram=self.ram)
        return found.fits


ANY_RAM = "4TB"
"""The source speaks of the card alone."""
LONG = ("data.max_length=512k", "train.batch_tokens=512k", "data.packing=false")
STEP = ("train.batch_tokens=32k",)
CLAIMS = (
    Claim(who="paper", model="gpt-oss-120b", machine="H200", ram="1.5TB", settings=STEP),
    Claim(who="paper", model="Qwen2.5-72B", machine="H200", ram="1.5TB", settings=STEP),
    Claim(who="paper", model="Qwen2.5-32B", machine="GH200", ram="480GB", settings=STEP),
    Claim(who="paper", model="Qwen2.5-7B", machine="GH200", ram="480GB", settings=LONG),
    Claim(who="paper", model="Qwen2.5-14B", machine="A6000", ram="251GB", settings=STEP),
    Claim(who="paper", model="Qwen2.5-14B", machine="3090", ram="251GB", settings=STEP),
    Claim(who="LLMQ", model="Qwen2.5-7B", machine="5060 Ti", ram=ANY_RAM, settings=STEP),
    Claim(who="LLMQ", model="Qwen2.5-14B", machine="4090", ram=ANY_RAM, settings=STEP),
    Claim(who="MegaTrain-Plus", model="Llama-3.1-70B", machine="DGX Spark", ram="128GB",
          settings=STEP, fits=False),
)  # fmt: skip
