"""Makes Triton's interpreter quicker for the tests: `triton.language` is patched once a launch, not once a call.

The interpreter swaps the functions of `triton.language` for its own when a launch starts, and puts them back when it
ends. It swaps them again at every call of a nested `@triton.jit` helper, which changes nothing any more and takes up
to half of the time of kernels made of small helpers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def patch_once_per_launch() -> None:
    """From now on, a nested call patches only where its module sees a part of the language that is not patched yet."""
    import triton.language as tl
    from triton.runtime import interpreter

    if getattr(interpreter, "_patches_once", False):
        return
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    launches: list[set[int]] = []  # of each launch that is running, the modules that are patched

    @functools.cache
    def modules_of(fn: Callable[..., Any]) -> frozenset[int]:
        """The modules that `patch` would find in fn's globals."""
        return frozenset(id(value) for value in fn.__globals__.values() if value is tl or value is tl.core)

    def patch_new(fn: Callable[..., Any]) -> Any:
        if not launches:
            return patch(fn)
        modules = modules_of(fn)
        if modules <= launches[-1] and modules:
            return interpreter._LangPatchScope()  # nothing changed, nothing to put back
        launches[-1].update(modules)
        return patch(fn)

    @functools.wraps(launch)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        launches.append(set())
        try:
            return launch(self, *args, **kwargs)
        finally:
            launches.pop()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_new, counted
    interpreter._patches_once = True
