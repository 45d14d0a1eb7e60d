"""YAML specs as pytest items: same list, ids and runners as `harness run`, but nothing is written into docs/.

Loaded by the root conftest. Collecting reads specs only: no torch, no device, no model.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.errors import CheckFailed, HarnessError, RunError, SpecError, UsageError
from harness.require import REQUIREMENTS, required
from harness.spec import Case, LoadedSpec, load_spec, plan

if TYPE_CHECKING:
    from harness.context import RunContext
    from harness.locks import Place
    from harness.record.lines import AnyLine, CaseLine

XDIST_WAIT_S = 3600.0  # for a GPU, or for a turn to time: other workers' cases take minutes, not hours


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--require` turns skips for a missing thing into failures; `--device` picks where children run."""
    group = parser.getgroup("specs", "YAML specs of the harness")
    group.addoption(
        "--require",
        default="",
        metavar="WHAT",
        help=f"comma-separated: what must be there; a case that lacks it fails ({', '.join(REQUIREMENTS)})",
    )
    group.addoption(
        "--device", default=None, metavar="DEVICE", help="device of the child processes: cpu, cuda or cuda:N"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse an unknown word in --require before anything is collected."""
    try:
        _required(config)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep listing fast: hypothesis's summary hook would import the whole library to find that no test used it."""
    manager = session.config.pluginmanager
    if session.config.option.collectonly and "hypothesis" not in sys.modules:
        plugin = manager.get_plugin("hypothesispytest")
        if plugin is not None:
            manager.unregister(plugin)


def _required(config: pytest.Config) -> tuple[str, ...]:
    return required([str(config.getoption("--require"))])


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Specs: YAML files directly under specs/, and any YAML file named on the command line."""
    if file_path.suffix not in (".yaml", ".yml"):
        return None
    named = parent.session.isinitpath(file_path)
    if named or (file_path.suffix == ".yaml" and file_path.parent == parent.config.rootpath / "specs"):
        collector: pytest.Collector = SpecFile.from_parent(parent, path=file_path)
        return collector
    return None


class SpecFile(pytest.File):
    """One spec; collects to its planned cases, or to one error with every problem in it."""

    loaded: LoadedSpec

    def collect(self) -> Iterable[pytest.Item]:
        try:
            self.loaded = load_spec(self.path, shown=self.nodeid)
        except SpecError as error:
            raise self.CollectError(str(error)) from None
        for case in plan(self.loaded):
            item: SpecItem = SpecItem.from_parent(self, name=case.name, callobj=run_check)
            item.take(case)
            yield item


class SpecItem(pytest.Function):
    """One case. A plain pytest function item, so fixtures and marks work as anywhere."""

    case: Case

    def take(self, case: Case) -> None:
        """Attach the case and the marks that its spec asks for."""
        self.case = case
        for mark in case.marks:
            self.add_marker(mark)
        if case.skip is not None:
            self.add_marker(pytest.mark.skip(reason=case.skip))
        if case.xfail is not None:
            reason = f"{case.xfail.reason} ({case.xfail.issue})"
            self.add_marker(pytest.mark.xfail(reason=reason, raises=CheckFailed, strict=True))

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, self.case.line - 1, self.case.name

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *args: Any, **kwargs: Any) -> Any:
        """Our own errors are their text; anything else keeps pytest's traceback."""
        if isinstance(excinfo.value, HarnessError):
            return str(excinfo.value)
        return super().repr_failure(excinfo, *args, **kwargs)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A skip's place is its spec, not the line of code that skipped: pytest folds by place and reason, so the cases of
    a spec that lack the same thing are one line of the summary."""
    report = yield
    if isinstance(item, SpecItem) and report.skipped and isinstance(report.longrepr, tuple):
        report.longrepr = (str(item.path), 1, report.longrepr[2])
    return report


class Contexts:
    """The session's run context; one spec's children are closed before another spec's start.

    A worker of pytest-xdist leases a GPU for each case, the last one if it is free: its children stay there, and those
    of another worker are idle while it has the lock. What is timed waits for its turn.
    """

    def __init__(self, config: pytest.Config, folder: Path, command: Sequence[str] | None = None) -> None:
        self._config = config
        self._folder = folder
        self._command = command
        self._worker = hasattr(config, "workerinput")
        self._path: Path | None = None
        self._place: Place | None = None
        self._context: RunContext | None = None

    def of(self, loaded: LoadedSpec) -> RunContext:
        """The context, ready for this spec."""
        from harness.context import RunContext
        from harness.process import WORKER_COMMAND

        if self._context is None:
            self._context = RunContext(
                log_dir=self._folder,
                device=self._config.getoption("--device"),
                require=_required(self._config),
                command=self._command or WORKER_COMMAND,
                place=self._place,
                lock_wait_s=XDIST_WAIT_S if self._worker else 0.0,
            )
        elif self._path != loaded.path:
            self._context.close()
        self._path = loaded.path
        return self._context

    @contextlib.contextmanager
    def lease(self, case: Case) -> Iterator[None]:
        """Beside other workers, hold a GPU while a case runs; alone, a context locks what it times itself."""
        from harness.locks import hold
        from harness.needs import device_of

        device = device_of(case, self._config.getoption("--device"))
        if not self._worker or not device.startswith("cuda"):
            yield
            return
        with hold(device, wait_s=XDIST_WAIT_S, prefer=self._place) as (place,):
            if place != self._place:
                self.close()
                self._context, self._place = None, place
            yield

    def close(self) -> None:
        """End the children."""
        if self._context is not None:
            self._context.close()


@pytest.fixture(scope="session")
def spec_contexts(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Contexts]:
    """Owner of child processes and logs for the whole session."""
    contexts = Contexts(pytestconfig, tmp_path_factory.mktemp("specs"))
    yield contexts
    contexts.close()


@pytest.fixture
def spec_case(request: pytest.FixtureRequest) -> Case:
    """The case of the running item."""
    case: Case = request.node.case
    return case


@pytest.fixture
def spec_loaded(request: pytest.FixtureRequest) -> LoadedSpec:
    """The spec of the running item."""
    loaded: LoadedSpec = request.node.parent.loaded
    return loaded


def run_check(spec_case: Case, spec_loaded: LoadedSpec, spec_contexts: Contexts, record_property: Any) -> None:
    """Run one case through the same code as the CLI and map its outcome."""
    with spec_contexts.lease(spec_case):
        context = spec_contexts.of(spec_loaded)
        start = len(context.lines)
        line = context.run(spec_case)
    record_property("outcome", line.outcome)
    record_property("reason", line.reason)
    if line.verdict is not None:
        record_property("verdict", line.verdict)
    settle(spec_case, line, context.lines[start:], context.log_dir)


def settle(case: Case, line: CaseLine, lines: Iterable[AnyLine], logs: Path) -> None:
    """Return for what passes, skip what is skipped, raise for the rest with everything that a reader needs."""
    if line.outcome in ("pass", "unresolved") or (line.outcome == "declined" and case.declared_decline):
        return
    if line.outcome == "skipped":
        pytest.skip(line.reason)
    text = failure_text(case, line, lines, logs)
    if line.outcome == "error":
        raise RunError(text)
    raise CheckFailed(text)


def failure_text(case: Case, line: CaseLine, lines: Iterable[AnyLine], logs: Path) -> str:
    """Place, claim, reason, first divergence, log and the command that runs this case alone."""
    found = [getattr(raw, "first_divergence", None) for raw in lines if getattr(raw, "case", None) == case.id]
    divergence = next((item for item in found if item is not None), None)
    rows = [
        f"{case.spec_path}:{case.line}: {case.name}: {line.outcome}",
        f"  claim: {case.claim}",
        f"  reason: {line.reason}",
    ]
    if divergence is not None:
        rows.append(f"  first divergence: {divergence.describe()}")
    if line.log:
        rows.append(f"  log: {logs / line.log}")
    rows.append(f"  rerun: harness run {case.spec_path} --only '{case.name}'")
    return "\n".join(rows)
