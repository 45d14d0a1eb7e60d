"""The rules about pairs: what is measured twice, what is measured too little, what a gate does not reach. Pure but for
the prompts and the checkpoint's config and tokenizer, which it reads where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from engine.flags import FLAGS
from harness.spec import model as m
from harness.spec.lint_text import looks_random, sliding_window, token_counter
from harness.spec.load import LoadedSpec
from harness.spec.matrix import cell_name
from harness.spec.plan import Case
from harness.spec.resolve import find_checkpoint, prompt_text
from harness.spec.yaml12 import Loc

RULES: dict[str, str] = {
    "identical-cells": "two cells of a check run the same thing",
    "identical-checks": "two checks run the same thing",
    "identical-arms": "two arms run the same thing",
    "nothing-runs": "every check is skipped",
    "cannot-fail": "no stage of an attribution has to pass",
    "horizon": "no probe, attribution or parity check reaches past the window",
    "single-prompt": "a headline from one prompt",
    "untimed-prompt": "fewer repeats than prompts",
    "no-verdict": "too few repeats for a verdict",
    "no-warmup": "the first repeat pays for what later ones do not",
    "unprobed": "an arm whose block size or flags no probe covers",
    "no-parity": "an arm whose block size no parity check covers",
    "short-gate": "a gate that stops before the benchmark does",
    "random-prompt": "a prompt of random tokens",
    "no-stream": "kernel times without the memory's own rate beside them",
    "no-byte-check": "kernel times without row identity of the ops around them",
    "few-calls": "too few identical calls to see a race",
    "small-rotation": "weights that may stay in the cache",
    "rows": "kernel times without one row, or without more than one",
}
WALK = 128  # tokens that a walk adds to the longest draw
STAGE = "rowwise"  # the stage that a benchmark times
FEW_PAIRS = 3


@dataclass(frozen=True)
class Finding:
    """One warning: where in the file, what is wrong, what to do."""

    rule: str
    loc: Loc
    what: str
    todo: str


@dataclass(frozen=True)
class Subject:
    """A spec as the rules see it."""

    loaded: LoadedSpec
    cases: tuple[Case, ...]
    models: Path | None

    def of(self, kind: type[m.CheckBase]) -> list[tuple[int, Case]]:
        """Cases of one kind that run, with the place of their check."""
        return [(self.place(case), case) for case in self.cases if isinstance(case.check, kind) and not case.skip]

    def place(self, case: Case) -> int:
        """Index of the case's check in the file."""
        return next(index for index, check in enumerate(self.loaded.spec.checks) if check.id == case.check.id)

    @cached_property
    def checkpoint(self) -> Path | None:
        """The target's folder, where it is."""
        pair = self.loaded.spec.pair
        return find_checkpoint(pair.target.path, self.loaded.folder, self.models) if pair is not None else None

    @cached_property
    def window(self) -> int | None:
        """The sliding window: from the checkpoint's config, else from what the spec itself expects of it."""
        if self.checkpoint is not None and (read := sliding_window(self.checkpoint)) is not None:
            return read
        for _, case in self.of(m.Geometry):
            assert isinstance(case.check, m.Geometry)
            stated = case.check.expect.target.get("sliding_window")
            if isinstance(stated, int) and not isinstance(stated, bool):
                return stated
        return None

    def tokens(self, prompts: Iterable[m.Prompt]) -> int:
        """Tokens of the longest prompt; without a tokenizer its bytes, which are at least as many."""
        return max((self._count(prompt_text(prompt, self.loaded.folder)) for prompt in prompts), default=0)

    @cached_property
    def _count(self) -> Callable[[str], int]:
        return token_counter(self.checkpoint)


def effective(env: Mapping[str, str | None]) -> tuple[tuple[str, bool | int], ...]:
    """What flags come to: null is the default, `false` is 0, and a row limit means nothing without multirow."""
    values = {name: FLAGS[name].parse(env.get(name) or FLAGS[name].default) for name in FLAGS}
    multirow, limit = "MLXCEL_QMV_MULTIROW", "MLXCEL_QMV_MULTIROW_MAX_ROWS"
    if values.get(limit) == 1:
        values[multirow] = False
    if values.get(multirow) is False:
        values[limit] = 1
    return tuple(sorted(values.items()))


def spec_findings(subject: Subject) -> Iterator[Finding]:
    """Every finding of the rules about pairs and specs as a whole."""
    checks = subject.loaded.spec.checks
    if all(check.skip for check in checks):
        yield Finding("nothing-runs", ("checks",), "every check is skipped, so no case runs", "take a `skip` out")
    yield from _identical(subject)
    yield from _random_prompts(checks, subject.loaded.folder)
    for index, check in enumerate(checks):
        if isinstance(check, m.Attribution) and not check.must_pass:
            what = "no stage has to pass, so this check cannot fail"
            yield Finding(
                "cannot-fail", ("checks", index), what, "name the stage that is meant to be exact in must_pass"
            )
    yield from _horizons(subject)
    for index, case in subject.of(m.Throughput):
        yield from _benchmark(subject, index, case)


# ---- the same thing twice -------------------------------------------------------------------------------------------


def _identical(subject: Subject) -> Iterator[Finding]:
    """Cells, and whole checks, that come to the same work after resolving defaults, axes and flags."""
    seen: dict[object, Case] = {}
    told: set[Loc] = set()
    for case in subject.cases:
        key = _work(case)
        first = seen.setdefault(key, case)
        if first is case:
            continue
        index = subject.place(case)
        if first.check.id != case.check.id:
            loc: Loc = ("checks", index)
            what = f"'{case.name}' runs exactly what '{first.name}' runs"
            finding = Finding("identical-checks", loc, what, "take one out, or change what sets it apart")
        else:
            loc = ("checks", index, *_differing(case, first))
            what = f"cells {_cell(first)} and {_cell(case)} are identical{_because(case, first)}"
            finding = Finding(
                "identical-cells", loc, what, "drop one of the values: a cell that changes nothing proves nothing"
            )
        if loc not in told:
            told.add(loc)
            yield finding


def _work(case: Case) -> object:
    """What a case does, without its name and without what only says when it runs."""
    left_out = {"id", "slow", "skip", "xfail", "requires", "matrix", "exclude", "include", "expect_cells", "stages"}
    own = case.check.model_dump(mode="json", exclude=left_out)
    arms = [{**arm, "env": effective({**case.env, **arm["env"]})} for arm in own.pop("arms", ())]
    stage = case.fields.get("stage")
    return repr((sorted(own.items(), key=lambda item: item[0]), arms, stage, effective(case.env)))


def _differing(case: Case, first: Case) -> Loc:
    """Where in its check the value stands by which a cell only seems to differ."""
    before = dict(first.cell)
    for axis, text in case.cell:
        if before.get(axis) != text:
            entry = case.check.matrix.get(axis)
            values = entry.values if entry is not None else ()
            place = next((i for i, value in enumerate(values) if _shown(value) == text), None)
            return ("matrix", axis, "values", place) if place is not None else ("matrix", axis)
    return ()


def _because(case: Case, first: Case) -> str:
    for name, value in case.env.items():
        if first.env.get(name) != value:
            return f": {name} {_shown(first.env.get(name))} and {_shown(value)} come to the same"
    return ""


def _shown(value: m.Scalar) -> str:
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _cell(case: Case) -> str:
    return cell_name(tuple(case.cell)) or case.name


# ---- prompts --------------------------------------------------------------------------------------------------------


def _random_prompts(checks: Iterable[m.CheckKind], folder: Path) -> Iterator[Finding]:
    for index, check in enumerate(checks):
        if not isinstance(check, m.GreedyParity | m.Throughput | m.Decline) or check.prompts is None:
            continue
        for place, prompt in enumerate(check.prompts):
            if reason := looks_random(prompt_text(prompt, folder)):
                what = (
                    f"this prompt looks like random tokens ({reason}), on which acceptance and near ties are not text's"
                )
                yield Finding(
                    "random-prompt", ("checks", index, "prompts", place), what, "use a prompt that people write"
                )


# ---- reach ----------------------------------------------------------------------------------------------------------


def reach(subject: Subject, case: Case) -> int:
    """The furthest position that a case comes to."""
    check = case.check
    if isinstance(check, m.ExactnessProbe | m.Attribution):
        return max(check.draws) + (WALK if check.walk else _block_size(case))
    if isinstance(check, m.GreedyParity | m.Throughput):
        return subject.tokens(check.prompts or ()) + check.max_tokens
    return 0


def _block_size(case: Case) -> int:
    check = case.check
    sizes = getattr(check, "block_sizes", None) or (getattr(check, "block_size", None) or case.block_size,)
    return int(max(sizes))


def _horizons(subject: Subject) -> Iterator[Finding]:
    """Bugs of a wrapped ring show past the window only: each kind of gate must go there at least once."""
    if subject.window is None:
        return
    kinds: tuple[tuple[type[m.CheckBase], str, str], ...] = (
        (m.ExactnessProbe, "draws", "add a draw of window + 32 tokens"),
        (m.Attribution, "draws", "add a draw of window + 32 tokens"),
        (m.GreedyParity, "max_tokens", "add a check with a prompt nearly as long as the window, or raise max_tokens"),
    )
    for kind, key, todo in kinds:
        found = subject.of(kind)
        if not found:
            continue
        index, case = max(found, key=lambda item: reach(subject, item[1]))
        size, far = _block_size(case), reach(subject, case)
        if far < subject.window + size:
            what = (
                f"the longest {case.kind} reaches position {far}; past window + block size, {subject.window} + {size},"
            )
            what += " a sliding layer's ring has wrapped, and this one never sees it"
            yield Finding("horizon", ("checks", index, key), what, todo)


# ---- benchmarks and their gates -------------------------------------------------------------------------------------


def _benchmark(subject: Subject, index: int, case: Case) -> Iterator[Finding]:
    check = case.check
    assert isinstance(check, m.Throughput)
    at: Loc = ("checks", index)
    prompts = check.prompts or ()
    if len(prompts) == 1:
        what = "the headline rests on one prompt, whose acceptance is its own"
        yield Finding("single-prompt", (*at, "prompts"), what, "time prompts of several kinds: code, prose, a list")
    if check.repeats < len(prompts):
        never = len(prompts) - check.repeats
        what = f"{check.repeats} repeats take one prompt each, so {never} of {len(prompts)} are never timed"
        yield Finding("untimed-prompt", (*at, "repeats"), what, "give every prompt a repeat")
    if check.repeats < FEW_PAIRS:
        what = f"{check.repeats} pairs never give a verdict; it takes {FEW_PAIRS}, and an interval takes 6"
        yield Finding("no-verdict", (*at, "repeats"), what, "raise repeats")
    if check.warmup == 0:
        what = "without a warm-up pass the first repeat pays for compilation and cold caches"
        yield Finding("no-warmup", (*at, "warmup"), what, "set warmup to 1 or more")
    yield from _arms(case, check, at)
    for place, arm in enumerate(check.arms):
        yield from _gates(subject, case, arm, (*at, "arms", place), at)


def _arms(case: Case, check: m.Throughput, at: Loc) -> Iterator[Finding]:
    seen: dict[object, m.Arm] = {}
    for place, arm in enumerate(check.arms):
        first = seen.setdefault((arm.block_size, effective({**case.env, **arm.env})), arm)
        if first is not arm:
            what = f"arms '{first.name}' and '{arm.name}' are identical: block size {arm.block_size}, the same flags"
            yield Finding("identical-arms", (*at, "arms", place), what, "change what sets them apart, or take one out")


def _gates(subject: Subject, case: Case, arm: m.Arm, at: Loc, head: Loc) -> Iterator[Finding]:
    """Whether what an arm runs was compared before: its block size, its flags, its length."""
    check = case.check
    assert isinstance(check, m.Throughput)
    size, flags = arm.block_size or case.block_size, effective({**case.env, **arm.env})
    probes = [found for found in _probes(subject) if size in _sizes(found)]
    if not probes:
        what = f"no probe of block size {size}, which arm '{arm.name}' times"
        yield Finding("unprobed", at, what, f"add {size} to the block_sizes of an exactness_probe check")
    elif not any(effective(found.env) == flags for found in probes):
        what = f"no probe of block size {size} under the flags of arm '{arm.name}'"
        yield Finding("unprobed", at, what, "give an exactness_probe or attribution check these flags")
    parities = [c for _, c in subject.of(m.GreedyParity) if _stage(c) == STAGE and size in _sizes(c)]
    if not parities:
        what = f"no greedy_parity of block size {size}, which arm '{arm.name}' times"
        yield Finding("no-parity", at, what, f"add {size} to the block_sizes of a greedy_parity check")
        return
    longest = max(parities, key=lambda found: found.check.max_tokens)  # type: ignore[union-attr]
    assert isinstance(longest.check, m.GreedyParity)
    if longest.check.max_tokens < check.max_tokens:
        what = f"'{longest.name}' compares {longest.check.max_tokens} tokens at block size {size}, the benchmark runs"
        yield Finding("short-gate", (*head, "max_tokens"), f"{what} {check.max_tokens}", "compare at least as many")
    elif check.ignore_stop and not any(found.check.ignore_stop for found in parities):  # type: ignore[union-attr]
        what = f"'{longest.name}' ends at a stop token, the benchmark runs on past it"
        yield Finding("short-gate", (*head, "ignore_stop"), what, "set ignore_stop in the parity check too")
    if subject.window is None or not probes:
        return
    past = subject.window + size
    far_enough = [found for found in _probes(subject) if reach(subject, found) >= past]  # none: `horizon` says so
    if far_enough and reach(subject, case) >= past and not any(found in far_enough for found in probes):
        what = f"the benchmark reaches past the window of {subject.window}, its probes of block size {size} do not"
        yield Finding("short-gate", (*head, "max_tokens"), what, "give a probe a draw of window + 32 tokens")


def _probes(subject: Subject) -> list[Case]:
    """Cases that probe the stage a benchmark times, and fail where it is not exact."""
    found = [case for _, case in subject.of(m.ExactnessProbe) if _stage(case) == STAGE]
    for _, case in subject.of(m.Attribution):
        assert isinstance(case.check, m.Attribution)
        if case.fields.get("stage") == STAGE and STAGE in case.check.must_pass:
            found.append(case)
    return found


def _stage(case: Case) -> str:
    return str(getattr(case.check, "stage", STAGE))


def _sizes(case: Case) -> tuple[int, ...]:
    check = case.check
    sizes = getattr(check, "block_sizes", None) or (getattr(check, "block_size", None) or case.block_size,)
    return tuple(sizes)
