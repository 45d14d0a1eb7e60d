"""Rules that a kernel's source must follow and no compiled form shows: found by reading the syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator

FORBIDDEN_CALLS = {
    "autotune": "picks a configuration by timing, so bytes may change from run to run",
    "heuristics": "picks a configuration by argument values, so bytes may change with M",
    "libdevice": "does not run in the interpreter",
    "rand": "kernels have no random state",
}
HOST_SYNCS = ("item", "tolist", "cpu", "numpy", "synchronize")
"""Methods that wait for the device: a CUDA graph cannot capture them."""

DOT_HOME = ("jit.py", "dot")
"""The one place that may call tl.dot: elsewhere fp32 operands could become tf32, or bf16 ones be interpreted wrong."""

JITS = ("triton.jit", "gluon.jit", "jit")
RELEASES_FIRST = ("_qmv_ahead",)
"""Whose consumers may be placed before its wait: a product's, which are few and small (decision 15)."""

NORMS = ("weight_ptr", "post_weight_ptr", "next_weight_ptr", "scalar_ptr", "norm_heads_ptr")
SETTLED = (*NORMS, "codes_ptr", "scales_ptr", "reach_ptr", "data_ptr")
STEP = ("position_ptr", "cos_ptr", "sin_ptr")
READ_AHEAD = {"values_of": ("v_ptr",), "scaled_values": ("v_ptr",)}
"""What may be read before the wait: parameters; what a step's first launch has settled; and behind a launch that
releases late, what was written before that one."""

Function = ast.FunctionDef


def violations(name: str, source: str, launched: set[str] | None = None) -> list[str]:
    """What breaks the rules in a module, a line each; `launched`: kernels that other modules launch."""
    tree = ast.parse(source)
    started = launched_kernels(source) | (launched or set())
    found = [f"{name}:{line}: {text}" for line, text in _forbidden(tree)]
    if launched_kernels(source):
        found += [f"{name}:{line}: {text}" for line, text in _host_syncs(tree)]
    for function in _jitted(tree):
        found += [f"{name}:{line}: {function.name}: {text}" for line, text in _body(name, function)]
        if function.name in started:
            found += [f"{name}:{line}: {function.name}: {text}" for line, text in _dependent_launch(function)]
            found += [f"{name}:{function.lineno}: {function.name}: {text}" for text in _specialized(function)]
    return found


def launched_kernels(source: str) -> set[str]:
    """Names that a module launches: `name[grid](...)`."""
    return {
        node.func.value.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name)
    }


def _dotted(node: ast.expr) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


def _jitted(tree: ast.Module) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(_dotted(x) in JITS for x in node.decorator_list):
            yield node


def _forbidden(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in FORBIDDEN_CALLS:
            yield node.lineno, f"{ast.unparse(node)}: {FORBIDDEN_CALLS[node.attr]}"


def _host_syncs(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in HOST_SYNCS:
            yield (
                node.lineno,
                f"{ast.unparse(node.func)}() waits for the device: a CUDA graph cannot capture the wrapper",
            )


def _calls(node: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            yield _dotted(inner), inner


def _body(name: str, function: Function) -> Iterator[tuple[int, str]]:
    for called, call in _calls(function):
        if called == "tl.dot" and (name, function.name) != DOT_HOME:
            yield call.lineno, "tl.dot outside kernels.jit.dot: fp32 operands would become tf32"
        if called.startswith("tl.atomic_"):
            yield (
                call.lineno,
                f"{called}: the order of float atomics is not fixed; write partials and sum them in order",
            )


def _dependent_launch(function: Function) -> Iterator[tuple[int, str]]:
    """A wait once, and at most one release, after it but in a product, both outside loops and conditions; before the
    wait nothing is stored and no rows are read.

    A program that ends has released its consumers, so a kernel need not say so.
    """
    statements = [x for x in function.body if not _is_docstring(x)]
    waits = -1
    for name in ("wait_for_producers", "release_consumers"):
        calls = [call for called, call in _calls(function) if called == name]
        top = [index for index, x in enumerate(statements) if _called(x) == name]
        if name == "release_consumers":
            if calls and (len(calls) != 1 or len(top) != 1):
                yield function.lineno, f"{name}() may be called once, outside loops and conditions: {len(calls)} found"
            elif top and top[0] < waits and function.name not in RELEASES_FIRST:
                yield calls[0].lineno, f"{name}() before the wait: the next launch's programs would take up the card"
            continue
        if len(calls) != 1 or len(top) != 1:
            yield function.lineno, f"{name}() must be called once, outside loops and conditions: {len(calls)} found"
            continue
        waits = top[0]
        aliases = _aliases(statements[: top[0]])
        for node in (node for statement in statements[: top[0]] for node in ast.walk(statement)):
            if isinstance(node, ast.Return):
                yield node.lineno, f"returns before {name}(): the order of launches is lost"
            if isinstance(node, ast.Call) and _dotted(node) == "_copy_rows":
                yield node.lineno, f"reads rows before {name}(): the launch that makes them may still run"
            for pointer in _read_from(node, aliases):
                if pointer not in (*SETTLED, *STEP, *READ_AHEAD.get(function.name, ())):
                    yield node.lineno, f"reads {pointer} before {name}(): the launch that makes it may still run"
            if isinstance(node, ast.Call) and _dotted(node) in ("tl.store", "gl.store", "store_rows"):
                yield node.lineno, "stores before wait_for_producers(): an earlier launch may still read there"


def _pointers(node: ast.AST, aliases: dict[str, set[str]]) -> set[str]:
    """The kernel's pointers that an expression is made of, by their own names."""
    names = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
    own = {name for name in names if name.endswith("_ptr")}
    return own.union(*(aliases.get(name, set()) for name in names))


def _aliases(statements: list[ast.stmt]) -> dict[str, set[str]]:
    """What names that are assigned hold of the kernel's pointers."""
    found: dict[str, set[str]] = {}
    for node in (node for statement in statements for node in ast.walk(statement)):
        if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Call):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    found[target.id] = _pointers(node.value, found)
    return found


def _read_from(node: ast.AST, aliases: dict[str, set[str]]) -> Iterator[str]:
    """Pointers that a call is given, but for a store's."""
    if isinstance(node, ast.Call) and _dotted(node) not in ("tl.store", "gl.store", "store_rows"):
        yield from sorted(set().union(*(_pointers(argument, aliases) for argument in node.args)))


def _specialized(function: Function) -> Iterator[str]:
    """Integers named like a count of rows must not reach the compiler."""
    unspecialized: set[str] = set()
    for decorator in function.decorator_list:
        for keyword in decorator.keywords if isinstance(decorator, ast.Call) else ():
            if keyword.arg == "do_not_specialize":
                unspecialized |= set(ast.literal_eval(keyword.value))
    for argument in function.args.args:
        annotated = argument.annotation is not None and "constexpr" in ast.unparse(argument.annotation)
        if argument.arg in ("M", "m", "rows", "num_rows", "position", "count") and (
            annotated or argument.arg not in unspecialized
        ):
            yield f"{argument.arg} reaches the compiler: name it in do_not_specialize and let it be no constexpr"


def _called(statement: ast.stmt) -> str | None:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return _dotted(statement.value)
    return None


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
