"""Where the engine and the kernels make tensors: on the device of what they work with, or on the host for a reason.

A machine without a GPU has one device, so a call that forgets to name it passes every other test there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FACTORIES = {
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "tensor",
    "as_tensor",
    "scalar_tensor",
    "eye",
    "linspace",
    "rand",
    "randn",
    "randint",
    "randperm",
    "empty_strided",
    "frombuffer",
    "from_numpy",
}
ON_THE_HOST = {
    ("engine/compare.py", "flatten"): "snapshots are bytes on the host",
    ("engine/layers.py", "inv_freq"): "a table's first row, moved once by whoever asked",
    ("engine/probe.py", "run"): "text to be hashed",
    ("engine/reading.py", "__init__"): "pinned memory between a file and a GPU",
    ("engine/reading.py", "_read_plain"): "the file itself",
    ("engine/room.py", "__init__"): "pinned words between the host and a GPU",
    ("kernels/testing.py", "slot_independent"): "random rows, the same on every device",
}
"""(file, function) -> why."""


def factories(source: str) -> Iterator[tuple[str, int]]:
    """(enclosing function, line) of every `torch` factory call that names no device."""

    def walk(node: ast.AST, function: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            inside = child.name if isinstance(child, ast.FunctionDef) else function
            if isinstance(child, ast.Call) and _is_factory(child.func) and not _has_device(child):
                yield function, child.lineno
            yield from walk(child, inside)

    yield from walk(ast.parse(source), "")


def _is_factory(called: ast.expr) -> bool:
    named = isinstance(called, ast.Attribute) and called.attr in FACTORIES
    return named and isinstance(called.value, ast.Name) and called.value.id == "torch"  # type: ignore[attr-defined]


def _has_device(call: ast.Call) -> bool:
    return any(keyword.arg == "device" for keyword in call.keywords)


def test_every_tensor_is_made_on_a_named_device() -> None:
    """Else the first record on a GPU ends in the middle, with two devices in one op."""
    files = [path for root in ("engine", "kernels") for path in (ROOT / root).rglob("*.py")]
    found = {
        (path.relative_to(ROOT).as_posix(), function): line
        for path in files
        if path.parent.name != "gate"  # nobody reads its tensors
        for function, line in factories(path.read_text(encoding="utf-8"))
    }
    assert {place: line for place, line in found.items() if place not in ON_THE_HOST} == {}
    assert set(ON_THE_HOST) <= set(found), "a reason for nothing"


def test_a_forgotten_device_is_seen() -> None:
    """The rule itself: in a function, in a lambda, in a class, and not where a device is named."""
    source = (
        "def a(x):\n"
        "    y = torch.zeros(3)\n"
        "    return lambda: torch.arange(4, device=x.device) + torch.full((1,), 2)\n"
        "class B:\n"
        "    def c(self): return x.new_zeros(3), torch.zeros_like(x), torch.tensor([1], device='cpu'), torch.ones(2)\n"
    )
    assert list(factories(source)) == [("a", 2), ("a", 3), ("c", 5)]
