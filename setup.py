"""Builds the host kernel, a plain shared library beside the module that loads it.

Everything else about the package is in pyproject.toml. A compiler without OpenMP, such as Apple's
clang, builds a kernel that uses one thread; without a compiler the torch kernel is used. Results
are the same bits in each case, and the build prints a warning about the lost speed.

Apple's clang is not linked with a libomp of its own: torch brings one, and a process that loads
two of them aborts.
"""

from __future__ import annotations

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError

SAME_BITS = ["-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
"""Roots and selections vectorize only where they need not report errors; no value changes."""


class BuildKernel(build_ext):
    """Compiles kernel.c to libkernel.so: with OpenMP, else without, else not at all."""

    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext: Extension) -> None:
        if self._built(ext, "-fopenmp", link=["-fopenmp"]):
            return
        if self._built(ext, "-fopenmp-simd", link=[]):
            self.warn(
                "kernel.c was compiled without OpenMP, which this C compiler does not support: "
                "updates use one thread, same results, slower"
            )
        else:
            self.warn(
                "kernel.c was not compiled (no working C compiler): "
                "the torch kernel will be used, same results, slower"
            )

    def _built(self, ext: Extension, flag: str, link: list[str]) -> bool:
        ext.extra_compile_args = [*SAME_BITS, flag, "-fvisibility=hidden"]
        ext.extra_link_args = link
        try:
            super().build_extension(ext)
        except CCompilerError:
            return False
        return True


class PlatformWheel(bdist_wheel):
    """The library does not depend on Python: one wheel per platform serves every version."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension("megatrain.optim.libkernel", ["src/megatrain/optim/kernel.c"], optional=True)
    ],
    cmdclass={"build_ext": BuildKernel, "bdist_wheel": PlatformWheel},
)
