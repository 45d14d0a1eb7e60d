"""The rollback enumerator: its cells are the ring's own, its scripts reach them all, faults in a rollback are seen."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import support_faults as faults
import torch
from support_spec import HEAD, write

from engine.cache import CacheSet, RingCache
from engine.errors import EngineError
from harness.checks.registry import get
from harness.record.evidence import contradictions_of
from harness.record.lines import AnyLine, CaseLine, DecisionLine, RollbackLine
from harness.record.rollback import rollback_figures
from harness.record.sections.rollback import rollback as section
from harness.rollback import AT_EDGE, FULL, KEPT, STATES, UNDONE, WRAPPED, Cell, Grid, coverage
from harness.spec import Case, load_spec, plan
from harness.worker import rollback as job

NANO = (1024, 1031)
TINY = (16, 23)


# ---- cells and scripts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4, 8], ids="block{}".format)
def test_states_say_what_the_slots_do(size: int) -> None:
    """Guards names that do not mean what the ring does: each is held against the slots of a block's rows."""
    grid = Grid(size, *TINY)
    for length in range(1, 3 * grid.slots):
        slots = [(length + row) % grid.slots for row in range(size)]
        for accepted in range(size):
            state, kept = grid.state(length, accepted), slots[: accepted + 1]
            wraps_inside = 0 in slots[1:]
            assert (state in (UNDONE, KEPT)) == wraps_inside
            assert (state == KEPT) == (0 in kept[1:])
            assert (state == AT_EDGE) == (slots[0] == 0)
            assert (state == WRAPPED) == (length > grid.slots and 0 not in slots and slots[-1] != grid.slots - 1)


@pytest.mark.parametrize("size", [2, 4, 7, 8], ids="block{}".format)
@pytest.mark.parametrize("ring", [TINY, NANO], ids=["tiny", "nano"])
def test_scripts_reach_every_reachable_cell_within_the_budget(size: int, ring: tuple[int, int]) -> None:
    """Guards a coverage figure that its own scripts cannot earn, and scripts that never end."""
    grid = Grid(size, *ring)
    runs = [(length, script) for length in grid.prompts.values() for script in grid.scripts(length)]
    found = coverage(grid, runs)
    assert found.missing == ()
    assert found.covered == found.reachable == len(grid.reachable)
    assert all(sum(script) + len(script) <= grid.budget for _, script in runs)
    assert {grid.window + by for by in range(-size, size + 1)} <= set(grid.prompts.values())
    assert sum(found.unreachable.values()) == found.cells - found.reachable
    assert {state for state, (_, total) in found.states.items() if not total} == ({FULL} if size >= 7 else set())


def test_what_is_called_unreachable_is() -> None:
    """Guards cells that are given up with a reason although some way of accepting leads there."""
    grid = Grid(3, *TINY)
    for prompt in grid.prompts.values():
        seen: set[Cell] = set()
        ends = {0}
        for end in range(grid.budget):  # every length that any script can stand at
            if end in ends:
                for accepted in range(min(grid.block_size, grid.budget - end)):
                    seen.add(Cell(prompt, grid.state(prompt + end, accepted), accepted))
                    ends.add(end + accepted + 1)
        assert seen == {cell for cell in grid.reachable if cell.prompt == prompt}
    reasons = {grid.unreachable(cell) for cell in grid.cells} - {None}
    assert reasons == {
        "all rows are kept, so none is undone",
        "the one row that is kept lies before the edge",
        "the prompt is already past it",
        f"more than {grid.budget} tokens away",
    }


# ---- the real loop over the tiny target -----------------------------------------------------------------------------


class Bench(SimpleNamespace):
    """What the job needs of a bench: a target at a stage, and a decision."""

    def __init__(self, target: Any, engaged: bool = True) -> None:
        super().__init__(target=target, prefill_chunk=0, engaged=engaged)

    def at(self, stage: str) -> Any:
        return self

    def decide(self, stage: str, block_size: int) -> tuple[Any, None]:
        log_line = "MTP engaged: exact" if self.engaged else "MTP declined: layer 0 differs"
        found = {"engaged": self.engaged, "inexact": False, "reason": log_line, "log_line": log_line}
        return SimpleNamespace(**found), None


def lines_of(target: Any, case: str, size: int = 4, engaged: bool = True) -> list[AnyLine]:
    """What the job sends for one block size."""
    sent: list[AnyLine] = []
    out = SimpleNamespace(case=case, line=sent.append, progress=lambda *_: None)
    with torch.inference_mode():
        job.run(Bench(target, engaged), {"stage": "rowwise", "block_sizes": [size]}, out)
    return sent


@functools.cache
def sound_lines() -> tuple[AnyLine, ...]:
    """The sound target's own."""
    return tuple(lines_of(faults.target(), "specs/tiny.yaml::rollback"))


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """A rollback case at the pair's block size."""
    (found,) = plan(load_spec(write(tmp_path, HEAD + "  - {kind: rollback, id: rollback}\n")))
    return found


def judge(case: Case, lines: Sequence[AnyLine]) -> tuple[str, str]:
    result = get("rollback").judge(case, lines, ())
    return result.outcome, result.reason


def test_the_sound_loop_visits_every_cell_and_differs_nowhere(case: Case) -> None:
    """Guards the whole: every round of every script is compared, and the accepts are those of the script."""
    lines = list(sound_lines())
    runs = [line for line in lines if isinstance(line, RollbackLine)]
    assert all(line.script == line.accepted_per_round and line.rounds_compared == len(line.script) for line in runs)
    assert all(line.tokens == 1 + sum(line.script) + len(line.script) for line in runs)
    outcome, reason = judge(case, lines)
    assert outcome == "pass", reason
    (figures,) = rollback_figures(runs)
    assert figures.coverage == 1.0
    assert (figures.window, figures.ring_slots, figures.block_size) == (*TINY, 4)
    assert reason.startswith(f"all {figures.reachable} reachable cells equal classic in every byte after ")
    assert set(figures.states) == set(STATES)


class KeepsARow(RingCache):
    """As a trim that is off by one leaves it: the newest row that stays is a rejected one."""

    def rollback(self, n: int) -> None:
        super().rollback(n)
        if n and self.length > self.window:
            self.kv[:, :, (self.length - 1) % self.slots] = self.kv[:, :, self.length % self.slots]


class LosesTheEdge(RingCache):
    """After a rollback over the ring's edge the last slot holds a rejected row."""

    def rollback(self, n: int) -> None:
        before = self.length
        super().rollback(n)
        if (before - 1) // self.slots > (self.length - 1) // self.slots:
            self.kv[:, :, self.slots - 1] = self.kv[:, :, 0]


class TrimsToTheWindow(RingCache):
    """A ring whose rows are cut at the window's end while it fills."""

    def write(self, k: torch.Tensor, v: torch.Tensor) -> None:
        start = self.length
        super().write(k, v)
        if start < self.window < self.length and k.shape[1] > 1:
            self.kv[:, :, 0] = 0


RINGS = [KeepsARow, LosesTheEdge, TrimsToTheWindow]


@pytest.mark.parametrize("ring", RINGS, ids=[ring.__name__ for ring in RINGS])
def test_a_faulty_ring_fails_with_the_smallest_generation(ring: type[RingCache], case: Case) -> None:
    """Guards the enumerator's reason to exist: each fault shows in some states only, and all of them are visited."""
    lines = lines_of(faults.WithRing(ring), case.id, size=2)
    outcome, reason = judge(case, lines)
    assert outcome == "fail"
    bad = [line for line in lines if isinstance(line, RollbackLine) and line.first_difference]
    good = [line for line in lines if isinstance(line, RollbackLine) and not line.first_difference]
    assert good, "the fault is not everywhere"
    assert f"{len(bad)} of {len(bad) + len(good)} generations differ, smallest block size 2, prompt " in reason
    assert "of layer 0's cache at" in reason
    smallest = min(bad, key=lambda line: (line.rounds_compared, line.prompt_tokens))
    assert f"prompt {smallest.prompt} ({smallest.prompt_tokens} tokens), accepts " in reason
    assert str(smallest.first_difference) in reason


class Forgetful(CacheSet):
    """Rolls every layer back but the last."""

    def rollback(self, n: int) -> None:
        for layer in self.layers[:-1]:
            layer.rollback(n)

    def clone(self) -> CacheSet:
        return Forgetful([layer.clone() for layer in self.layers])

    @property
    def length(self) -> int:
        return self.layers[0].length


def test_a_layer_that_is_not_rolled_back_is_named(case: Case) -> None:
    """Guards the other caches: a full layer that keeps rejected rows has other rows, not only other bytes."""

    class Target(faults.Delegate):
        def new_caches(self) -> CacheSet:
            return Forgetful(self.base.new_caches().layers)

    outcome, reason = judge(case, lines_of(Target(), case.id, size=2))
    assert outcome == "fail"
    assert "of layer 5's cache" in reason


def test_a_target_without_a_ring_is_an_error_in_words() -> None:
    """Guards against a green case on a target that has no edge at all."""

    class Flat(faults.Delegate):
        def new_caches(self) -> CacheSet:
            return CacheSet([layer for layer in self.base.new_caches().layers if not isinstance(layer, RingCache)])

    with pytest.raises(EngineError, match="no ring cache"):
        lines_of(Flat(), "x")


# ---- judged from raw lines ------------------------------------------------------------------------------------------


def test_coverage_is_counted_and_never_believed(case: Case) -> None:
    """Guards against a child that leaves generations out, or whose rounds accept other than the script says."""
    lines = list(sound_lines())
    last = max(place for place, line in enumerate(lines) if isinstance(line, RollbackLine))
    outcome, reason = judge(case, lines[:last])
    assert outcome == "error"
    assert "reachable cells were not visited: prompt 2S-2, " in reason
    other = lines[last].model_copy(update={"accepted_per_round": (0,) * 16, "rounds_compared": 16})
    assert judge(case, [*lines[:last], other])[0] == "error"
    idle = [
        line.model_copy(update={"rounds_compared": 0}) if isinstance(line, RollbackLine) else line for line in lines
    ]
    assert judge(case, idle)[0] == "error"
    assert judge(case, lines[:1]) == ("error", "block size 4: no generation was compared")


def test_a_pair_that_declines_is_declined_and_plays_nothing(case: Case) -> None:
    """Guards against calling the text of a declined pair a rollback fault."""
    lines = lines_of(faults.target(), case.id, engaged=False)
    assert [type(line) for line in lines] == [DecisionLine]
    assert judge(case, lines) == ("declined", "MTP declined: layer 0 differs")


def test_the_record_states_coverage_and_contradicts_a_false_pass(case: Case) -> None:
    """Guards the page: its figures come from the lines, and a pass that they do not bear out is named."""
    from harness.record.build import build_case
    from harness.record.certified import certify
    from harness.record.spec_view import SpecView

    none = certify((), {})
    spec = SpecView.parse(HEAD + "  - {kind: rollback, id: rollback}\n")
    end = CaseLine(case=case.id, kind="rollback", outcome="pass", reason="r", seconds=1.0)
    runs = [line for line in sound_lines() if isinstance(line, RollbackLine)]
    sound = build_case(case.id, [*runs, end], spec, withhold=False, certified=none)
    assert contradictions_of(sound, runs, None, none) == []
    record = SimpleNamespace(cases=(sound,))
    (figures,) = sound.rollback
    text = section(record, "stem")  # type: ignore[arg-type]
    assert f"{figures.reachable} of {figures.reachable} reachable cells visited (100.0 %)" in text
    assert f"Of {figures.cells} cells, {figures.cells - figures.reachable} cannot be reached:" in text
    fewer = build_case(case.id, [*runs[:-1], end], spec, withhold=False, certified=none)
    assert any("cells were visited" in problem for problem in contradictions_of(fewer, runs[:-1], None, none))
    assert "Not visited: prompt 2S-2" in section(SimpleNamespace(cases=(fewer,)), "stem")  # type: ignore[arg-type]
    wrong = [*runs[:-1], runs[-1].model_copy(update={"differing_bytes": 3, "first_difference": "3 bytes"})]
    false = build_case(case.id, [*wrong, end], spec, withhold=False, certified=none)
    assert any("differs" in problem for problem in contradictions_of(false, wrong, None, none))
    assert "**differs**" in section(SimpleNamespace(cases=(false,)), "stem")  # type: ignore[arg-type]
    older = build_case(case.id, [end], spec, withhold=False, certified=none)
    assert "rollback" not in older.model_dump(), "old records gain no key"


def test_the_short_prompt_fits_any_window() -> None:
    """Guards a prompt of no tokens where the window is tiny."""
    assert min(Grid(8, 4, 11).prompts.values()) >= 1
