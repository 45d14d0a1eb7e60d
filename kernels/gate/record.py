"""Which binaries a call would run on a GPU, found without one.

Triton's own launch code computes the specialization (which arguments are constants, which are divisible by 16) and
the cache key; only its driver is replaced, by one that names an architecture, and its compiler, by a note.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction


class PosedDriver:
    """Answers what a launch asks of a driver before it compiles, for an architecture that need not be there."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        """The architecture as a device number: every architecture gets its own kernel cache."""
        return self.arch

    def get_current_stream(self, device: int) -> int:
        """Any stream: nothing is launched."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """What Triton compiles for."""
        return GPUTarget("cuda", self.arch, 32)


@dataclass(frozen=True, eq=False)
class Variant:
    """One binary of a kernel: the source, what was specialized, and the options."""

    fn: Any
    key: str
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: Any

    @property
    def kernel(self) -> str:
        """The kernel's function name."""
        return str(self.fn.__name__)

    def compile(self, arch: int) -> CompiledKernel:
        """Compile for an architecture, 90 for sm_90; nothing is loaded."""
        source = self.fn.ASTSource(self.fn, self.signature, self.constants, self.attributes)
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=dict(self.options.__dict__))

    def describe(self) -> str:
        """What tells this variant from its siblings: constants and specialized arguments, short enough for a line."""
        names = list(self.signature)
        constants = {names[path[0]]: value for path, value in self.constants.items() if len(path) == 1}
        parts = [f"{name}={getattr(value, 'value', value)}" for name, value in constants.items()]
        aligned = [names[path[0]] for path, value in self.attributes.items() if value]
        parts.append(f"warps={self.options.num_warps} stages={self.options.num_stages}")
        return f"{', '.join(parts)}, divisible by 16: {' '.join(aligned) or 'none'}"


@contextmanager
def recorded_launches(arch: int) -> Iterator[list[Variant]]:
    """Inside, a launch compiles and runs nothing and appends its variant to the list; the same binary, the same object.

    Options are those of a GPU with dependent launches. RuntimeError under TRITON_INTERPRET: there is no compiler.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("the gate compiles kernels: run it in a process without TRITON_INTERPRET")
    launches: list[Variant] = []
    real_run, real_compile, real_driver = JITFunction.run, JITFunction._do_compile, triton.runtime.driver._active

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        options.setdefault("launch_pdl", True)
        launches.append(real_run(self, *args, grid=grid, warmup=True, **options))
        return launches[-1]

    def note(
        self: Any, key: str, signature: Any, device: int, constants: Any, options: Any, attributes: Any, warmup: bool
    ) -> Variant:
        variant = Variant(self, key, signature, constants, attributes, options)
        self.device_caches[device][0][key] = variant
        return variant

    triton.runtime.driver.set_active(PosedDriver(arch))
    JITFunction.run, JITFunction._do_compile = run, note
    try:
        yield launches
    finally:
        JITFunction.run, JITFunction._do_compile = real_run, real_compile
        triton.runtime.driver._active = real_driver
