"""Builds the host kernel, a plain shared library beside the module that loads it.

Everything else about the package stands in pyproject.toml. Without a C compiler the package is
built all the same: the torch kernel gives the same bits, more slowly.
"""

from __future__ import annotations

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError

SAME_BITS = ["-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
"""Roots and selections vectorise only where they need not report errors; no value changes."""


class BuildKernel(build_ext):
    """Compiles kernel.c to libkernel.so, or goes on without it and says so."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        try:
            super().build_extension(ext)
        except CCompilerError:
            self.warn(
                "kernel.c was not compiled (no working C compiler with OpenMP): "
                "the torch kernel will be used, same results, slower"
            )


class PlatformWheel(bdist_wheel):
    """The library knows nothing of Python: one wheel per platform serves every version."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            "megatrain.optim.libkernel",
            ["src/megatrain/optim/kernel.c"],
            extra_compile_args=[*SAME_BITS, "-fopenmp", "-fvisibility=hidden"],
            extra_link_args=["-fopenmp"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernel, "bdist_wheel": PlatformWheel},
)
