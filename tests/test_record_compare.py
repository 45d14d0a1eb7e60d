"""`harness compare`: pairs of records made from the committed ones by changing raw lines, one change a test.

Here: what holds for every pair, bytes, outcomes, and what must be alike before anything is compared.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import support_record as support
from support_compare import (
    CHANGES,
    FAILING_DRAW,
    GATE_UP,
    KERNELS,
    NANO,
    REPEATS,
    against,
    base,
    changed,
    drop,
    ended,
    of,
    pair,
    put,
    rows_of,
    side,
    timed,
    where,
)

from harness.record.compare import compare
from harness.record.compare_side import Side
from harness.record.lines import ArmLine, ChildLine, DecisionLine, DrawLine
from harness.record.spec_view import SpecView
from harness.record.store import RecordPaths

# ---- properties ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHANGES)
def test_a_record_against_itself_is_all_the_same(name: str) -> None:
    """Whatever a record holds: nothing moved, nothing is without a word, and the exit code is 0."""
    found = compare(changed(name), changed(name))
    assert {row.status for row in found.rows} == {"same"}
    assert all(row.reason for row in found.rows)
    assert (found.exit_code(), found.exit_code(strict=True), found.lost) == (0, 0, ())
    assert {row.case for row in found.rows} == set(changed(name).names)


@pytest.mark.parametrize("scenario", support.SCENARIOS)
def test_every_ending_against_itself_is_all_the_same(scenario: str) -> None:
    """Skipped, failed, inexact, declined: a record of any outcome equals itself."""
    record = support.record_of(support.run_lines(support.SCENARIOS[scenario]))
    one = Side("x", record, support.ENV, SpecView.parse(support.SPEC_TEXT))
    assert {row.status for row in compare(one, one).rows} == {"same"}


@pytest.mark.parametrize("paths", [NANO, KERNELS], ids=["nano", "kernels"])
def test_swapping_swaps_regressed_and_improved_and_nothing_else(paths: RecordPaths) -> None:
    """A rule that prefers one side would show here, over every pair of changes."""
    mirror = {"regressed": "improved", "improved": "regressed"}
    names = [name for name, (of_paths, _) in CHANGES.items() if of_paths is paths]
    moves = 0
    for one, two in itertools.combinations(names, 2):
        there, back = compare(changed(one), changed(two)), compare(changed(two), changed(one))
        expected = {(row.case, row.figure): mirror.get(row.status, row.status) for row in there.rows}
        assert {(row.case, row.figure): row.status for row in back.rows} == expected, (one, two)
        moves += there.counts["regressed"] + there.counts["improved"]
    assert moves > 10  # or the property holds for want of anything to swap


def test_every_row_is_named_once() -> None:
    """A case and a figure find one row, so that programs can key on them."""
    for name in CHANGES:
        rows = [(row.case, row.figure, row.reason) for row in against(name).rows]
        assert len(rows) == len(set(rows)), name


# ---- bytes and outcomes ----------------------------------------------------------------------------------------------


def test_a_draw_that_no_longer_holds_is_a_regression_before_any_speed() -> None:
    """The statement, the outcome, the exit code; and bytes stand before outcomes, outcomes before speed."""
    found = against("draw fails")
    row = rows_of(found, "draw 3 (1056 tokens), block size 4", "probe")
    assert (row.status, row.aspect, row.a, row.b) == (
        "regressed",
        "bytes",
        "exact",
        "77 bytes differ from position 3 on",
    )
    assert rows_of(found, "outcome", "probe").status == "regressed"
    assert rows_of(found, "statements", "probe").reason == "5 statements hold in both"
    assert found.exit_code() == 1
    for name in dict.fromkeys(row.case for row in found.rows):
        order = [("bytes", "outcome", "speed").index(row.aspect) for row in found.rows if row.case == name]
        assert order == sorted(order)


def test_wrong_text_withholds_speed_and_says_which_generation() -> None:
    """One differing token anywhere: no figure of speed is compared in the whole record."""
    found = against("text differs")
    row = rows_of(found, "docs (chat), block size 4", "parity")
    assert (row.status, row.b) == ("regressed", "differs from token 17 on")
    assert rows_of(found, "acceptance_length, block size 4", "parity").reason.startswith("inexact in B")
    delta = rows_of(found, "mtp: delta")
    assert delta.status == "not comparable"
    assert "withheld" in delta.reason


def test_bytes_that_differ_in_both_are_never_called_better() -> None:
    """3,416 bytes and 12 bytes are both wrong; a moved first divergence is told, not judged."""
    name = "attribution[stage:base+multirow:unset+large_d:unset]"
    other = of(name, DrawLine, differing_bytes=12)
    moved_on = of(name, DecisionLine, first_divergence=lambda x: x.first_divergence.model_copy(update={"layer": 3}))
    found = pair(NANO, other, moved_on)
    drawn = [row for row in found.rows if row.case == name and row.figure.startswith("draw")]
    assert drawn
    assert {row.status for row in drawn} == {"not comparable"}
    assert rows_of(found, "first_divergence", name).status == "not comparable"
    assert "another place" in rows_of(found, "first_divergence", name).reason
    assert found.exit_code() == 0


def test_a_stage_that_becomes_exact_improves_and_its_outcome_still_holds() -> None:
    """Declined as declared and pass are both what the spec asks for; the bytes tell the difference."""
    name = "attribution[stage:attention_mlp+multirow:unset+large_d:unset]"
    exact = (
        of(name, DrawLine, passed=True, differing_bytes=0, first_position=None),
        of(name, DecisionLine, engaged=True, first_divergence=None),
        ended(name, "pass"),
    )
    found = pair(NANO, *exact)
    assert "improved" in {row.status for row in found.rows if row.case == name and row.aspect == "bytes"}
    assert rows_of(found, "outcome", name).status == "same"


def test_a_decline_that_engages_is_a_regression_and_its_exact_draws_are_no_gain() -> None:
    """The draws of a `decline` are meant to differ, so its outcome speaks for them."""
    name = "base-declines"
    exact = of(name, DrawLine, passed=True, differing_bytes=0, first_position=None)
    engaged = of(name, DecisionLine, engaged=True, first_divergence=None)
    found = pair(NANO, exact, engaged, ended(name, "fail", "it engaged"))
    assert rows_of(found, "outcome", name).status == "regressed"
    assert found.counts["improved"] == 0


@pytest.mark.parametrize(
    ("old", "new", "status", "lost"),
    [
        ("pass", "fail", "regressed", False),
        ("fail", "pass", "improved", False),
        ("fail", "declined", "same", False),
        ("declined", "pass", "improved", False),
        ("pass", "skipped", "not comparable", True),
        ("pass", "error", "not comparable", True),
        ("error", "fail", "not comparable", False),
        ("unresolved", "pass", "not comparable", False),
        ("skipped", "skipped", "same", False),
    ],
)
def test_outcomes(old: str, new: str, status: str, lost: bool) -> None:
    """What was measured is judged; what was not decides nothing, and what got lost is named."""
    found = compare(side(NANO, ended("probe", old)), side(NANO, ended("probe", new)))
    row = rows_of(found, "outcome", "probe")
    assert (row.status, row.lost) == (status, lost)
    assert found.lost == (("probe",) if lost else ())
    assert found.exit_code(strict=True) == int(lost or status == "regressed")


def test_a_statement_that_only_one_record_has_is_named() -> None:
    """Fewer statements must not look like all statements."""
    found = pair(NANO, drop(lambda x: isinstance(x, DrawLine) and x.case.endswith("::probe") and "walk" in x.draw))
    alone = [row for row in found.rows if row.case == "probe" and "compared in A alone" in row.reason]
    assert len(alone) == 1
    assert "and 1 more" in alone[0].reason


def test_cases_that_one_record_lacks_are_named_on_both_sides() -> None:
    """Not planned and not run are two things; a case that held and is gone is lost."""
    name = "::decode"
    gone = drop(lambda x: getattr(x, "case", "").endswith(name))
    unplanned = where(
        lambda x: x.line == "start",
        lambda x: x.model_copy(update={"cases": tuple(c for c in x.cases if not c.endswith(name))}),  # type: ignore[union-attr]
    )
    cut, never = pair(NANO, gone), pair(NANO, gone, unplanned)
    assert rows_of(cut, "all").reason == "planned in B, but it did not run there"
    assert rows_of(never, "all").reason == "only in A"
    assert cut.lost == never.lost == ("decode",)
    assert (cut.exit_code(), cut.exit_code(strict=True)) == (0, 1)
    back = compare(side(NANO, gone, unplanned), base(NANO))
    assert (rows_of(back, "all").reason, back.lost) == ("only in B", ())


# ---- what must be alike ----------------------------------------------------------------------------------------------


def test_nothing_is_compared_across_devices() -> None:
    """Not even outcomes: one row for each case, with the reason."""
    found = pair(NANO, *CHANGES["other device"][1], timed(3.0), ended("probe", "fail"))
    assert {(row.figure, row.status, row.reason) for row in found.rows} == {
        ("all", "not comparable", "other device: CPU against GPU")
    }
    assert "Other device: CPU against GPU" in found.notes[0]


def test_another_cpu_stops_speed_and_not_outcomes() -> None:
    """Exactness is a claim about the code; a rate is one about the machine too."""
    found = pair(NANO, timed(3.0), *FAILING_DRAW, env=put("host", "cpu", value="Another CPU"))
    assert rows_of(found, "mtp: delta").reason.startswith("other CPU: Intel")
    assert rows_of(found, "outcome", "probe").status == "regressed"
    assert rows_of(found, "mtp: acceptance_length").status == "same"
    threads = pair(NANO, lambda x: x.model_copy(update={"threads": 8}) if isinstance(x, ChildLine) else x)
    assert rows_of(threads, "mtp: delta").reason == "other threads of the child: 1 against 8"


@pytest.mark.parametrize(
    ("before", "after", "stops"),
    [(None, 700, False), (700, 700, False), (700, 500, True)],
    ids=["an older record", "alike", "another limit"],
)
def test_what_an_older_record_does_not_say_of_a_gpu_is_no_difference(
    before: int | None, after: int, stops: bool
) -> None:
    """A field that came later made every record before it one of another card."""
    one, two = (side(KERNELS, env=put("gpu", "power_limit_w", value=value)) for value in (before, after))
    row = rows_of(compare(one, two), "all" if stops else "stream_share", GATE_UP)
    assert (row.status, row.reason.startswith("other GPU")) == ("not comparable" if stops else "same", stops)


def test_other_weights_and_other_prompts_are_another_question() -> None:
    """A changed checkpoint stops everything, a changed prompt file what reads it."""
    weights = pair(NANO, env=put("checkpoints", "target", "weights_sha256", value="0" * 64))
    assert {row.reason for row in weights.rows} == {"other weights: weights_sha256 of the target differs"}
    renamed = pair(NANO, env=put("checkpoints", "target", "name", value="elsewhere"))
    assert {row.status for row in renamed.rows} == {"same"}
    prompt = pair(NANO, timed(3.0), env=put("prompts", "prompts/docs.txt", value="0" * 64))
    assert rows_of(prompt, "all").reason == "other prompt: the content of prompts/docs.txt changed"
    assert rows_of(prompt, "outcome", "probe").status == "same"


@pytest.mark.parametrize(
    ("spec", "case", "reason"),
    [
        ((f"{REPEATS}256", f"{REPEATS}128"), "decode", "max_tokens 256 against 128"),
        (("block_sizes: [2, 4, 8]", "block_sizes: [2, 4]"), "parity", "block_sizes [2, 4, 8] against [2, 4]"),
        (("[8, 8, 8, 1056], walk: true", "[8], walk: true"), "probe", "draws [8, 8, 8, 1056] against [8]"),
    ],
)
def test_a_check_that_reads_otherwise_is_not_compared_and_the_others_are(
    spec: tuple[str, str], case: str, reason: str
) -> None:
    """The hash says that the spec changed; the reason says what of this check did."""
    found = pair(NANO, timed(3.0), *FAILING_DRAW, ended(case, "fail"), spec=spec)
    mine = [row for row in found.rows if row.case == case and row.status != "same"]
    assert mine
    assert {row.status for row in mine} == {"not comparable"}
    assert f"other spec: {reason}" in {row.reason for row in mine}
    others = {"decode": "probe", "probe": "decode", "parity": "probe"}[case]
    assert "regressed" in {row.status for row in found.rows if row.case == others}


def test_what_does_not_change_a_measurement_does_not_stop_it() -> None:
    """A comment, a title, a default written out, more repeats: the figures still compare."""
    for spec in (
        ("title: Gemma 4 nano pair", "title: The nano pair # renamed"),
        ("    arms: [{name: mtp, block_size: 4}]\n", "    arms: [{name: mtp}]\n    warmup: 1\n"),
        ("    repeats: 6", "    repeats: 12"),
    ):
        found = pair(NANO, timed(3.0), spec=spec)
        assert rows_of(found, "mtp: delta").status == "regressed", spec
        assert any("Other spec hash" in note for note in found.notes)
    judged = pair(NANO, ended("parity", "fail"), spec=("min_acceptance: 0.2", "min_acceptance: 0.9"))
    assert rows_of(judged, "outcome", "parity").reason == "other spec: min_acceptance 0.2 against 0.9"
    assert rows_of(judged, "acceptance_length, block size 4", "parity").status == "same"


def test_without_a_copy_of_the_spec_only_its_hash_can_speak() -> None:
    """A record.json that lies alone, of another spec."""
    other = side(NANO, spec=("    repeats: 6", "    repeats: 12"))
    found = compare(base(NANO), Side("alone", other.record))
    assert "other spec hash, and no copy" in rows_of(found, "all").reason
    assert {row.status for row in compare(base(NANO), Side("alone", base(NANO).record)).rows} == {"same"}


def test_arms_are_matched_by_name_block_size_and_flags() -> None:
    """The same name at another block size is another arm."""
    size = where(lambda x: getattr(x, "slot", "") == "arm", of("decode", ArmLine, block_size=8))
    assert rows_of(pair(NANO, size), "mtp: all").reason == "other block size: 4 against 8"
    renamed = where(lambda x: getattr(x, "slot", "") == "arm", of("decode", ArmLine, arm="wide"))
    found = pair(NANO, renamed)
    assert rows_of(found, "mtp: all").reason == "the arm is only in A"
    assert rows_of(found, "wide: all").reason == "the arm is only in B"
    flags = pair(NANO, spec=("{name: mtp, block_size: 4}", '{name: mtp, env: {MLXCEL_QMV_MULTIROW: "0"}}'))
    assert rows_of(flags, "mtp: all").reason.startswith("other flags: {} against {'MLXCEL_QMV_MULTIROW': '0'}")


def test_notes_say_what_else_differs() -> None:
    """Commit, versions, load, order in time: not reasons, but a reader must see them."""

    def change(env: dict[str, Any]) -> None:
        env["source"]["commit"], env["gate"] = "f" * 40, {"busy": True, "note": "other work was running"}

    later = lambda x: x.model_copy(update={"started_utc": "2026-11-01T00:00:00Z"}) if x.line == "start" else x  # noqa: E731
    notes = " ".join(pair(NANO, later, env=change).notes)
    for part in ("Commit: bdd549d65770 (clean) against ffffffffffff", "B: other work was running", "B is older than A"):
        assert part in notes
