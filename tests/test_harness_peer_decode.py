"""`peer_decode`: other engines on the same checkpoint. Ours must be exact; a peer is measured, or named with a reason.

The peers themselves run on tiny random weights; the committed nano pair stands for ours.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support_engine import TINY, TINY_31B, one_thread, random_pair_dirs
from support_geometry import Geometry
from support_harness import ROOT, SPEC_TEXT, engine_lines, worker, write_spec
from support_record import ENV, start_line

from engine.pair import load_pair
from engine.prefill import run_prefill
from harness.checks.base import Judgement
from harness.checks.registry import get
from harness.context import RunContext
from harness.errors import SpecError
from harness.protocol import Setup
from harness.record.build import build_case, build_record
from harness.record.certified import certify
from harness.record.lines import LINE_ADAPTER, AnyLine, PeerLine
from harness.record.sections.context import not_covered
from harness.record.sections.engines import engines
from harness.record.sections.summary import summary
from harness.record.spec_view import SpecView
from harness.spec import Case, load_spec, plan

CHECK = """\
  - kind: peer_decode
    id: engines
    prompts: [{text: one two three, form: raw}]
    contexts: [8, 40]
    tokens: 10
    min_speedup: {mlx_lm: 3}
"""
NANO = ROOT / "specs" / "checkpoints"
MEANING = 0.85
"""Least correlation of a peer's logits with ours on random weights, which amplify every rounding; found: 0.90 (mlx-lm,
whose 4-bit products add in bf16) to 0.9997. Weights in wrong places give about 0."""


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """The check in a scripted spec."""
    return next(c for c in plan(load_spec(write_spec(tmp_path, SPEC_TEXT + CHECK))) if c.kind == "peer_decode")


def peer(case: Case, name: str, reason: str | None = None) -> dict[str, Any]:
    return {"line": "peer", "case": case.id, "peer": name, "reason": reason, "version": "1.0", "note": "a script"}


def lines_for(case: Case, equal: int = 4, mlx_ms: float = 40.0, **absent: str) -> list[AnyLine]:
    """Lines of a whole case: ours at 10 ms, transformers at 100; `absent` gives reasons."""
    contents: list[dict[str, Any]] = []
    for arm, ms in (("ours", 10.0), ("mlx_lm", mlx_ms), ("transformers", 100.0)):
        for context in () if arm in absent else (8, 40):
            contents += engine_lines(case.id, arm, context, ms, equal if arm == "ours" else 0)
    contents += [peer(case, name, absent.get(name)) for name in ("mlx_lm", "transformers")]
    return [LINE_ADAPTER.validate_python(content) for content in contents]


def judge(case: Case, lines: Sequence[AnyLine]) -> Judgement:
    return get(case.kind).judge(case, lines, lines)


def test_what_a_case_concludes(case: Case) -> None:
    """Guards each way to a wrong conclusion: inexact rows with a speed, a bar that nobody measured, a silent peer."""
    good = judge(case, lines_for(case))
    assert good.outcome == "pass"
    assert "mlx_lm takes 4.00x ours (40.00 ms) after 8 tokens" in good.reason
    assert "0 of 8 rows of its block equal its chain" in good.reason
    assert judge(case, lines_for(case, equal=3)).reason.startswith("our own block differs from our chain in 1 of 4")
    slow = judge(case, lines_for(case, mlx_ms=29.0))
    assert (slow.outcome, "2.90 times ours, bar at least 3" in slow.reason) == ("fail", True)
    lone = judge(case, lines_for(case, mlx_lm="is not installed"))
    assert (lone.outcome, "mlx_lm was not measured" in lone.reason) == ("unresolved", True)
    none = judge(case, lines_for(case, mlx_lm="is not installed", transformers="has no Gemma 4"))
    assert (none.outcome, "transformers: has no Gemma 4" in none.reason) == ("skipped", True)
    silent = [line for line in lines_for(case) if not (isinstance(line, PeerLine) and line.peer == "mlx_lm")]
    assert judge(case, silent) == Judgement("error", "peer mlx_lm was neither measured nor skipped")
    untimed = [line for line in lines_for(case) if not (line.line == "decode" and line.context_tokens == 40)]
    assert judge(case, untimed) == Judgement("error", "ours was not timed after 40 tokens")


def run(tmp_path: Path, case: Case, **script: Any) -> tuple[Judgement, list[AnyLine]]:
    """The case through scripted children."""
    command = worker(tmp_path, **script)
    with RunContext(log_dir=tmp_path / "logs", command=command, lock_dir=tmp_path, job_timeout_s=20) as context:
        line = context.run(case)
    return Judgement(line.outcome, line.reason, line.verdict), context.lines


def test_each_peer_has_a_process_of_its_own(tmp_path: Path, case: Case) -> None:
    """Guards against a peer's libraries and memory in the process that is measured."""
    judgement, lines = run(tmp_path, case, decode_ms={"mlx_lm": 50.0})
    assert judgement.outcome == "pass"
    assert len((tmp_path / "starts.txt").read_text(encoding="utf-8").splitlines()) == 3
    assert [line.peer for line in lines if isinstance(line, PeerLine)] == ["mlx_lm", "transformers"]


def test_a_peer_that_dies_leaves_ours_and_a_reason(tmp_path: Path, case: Case) -> None:
    """Guards a record against a peer that is killed for memory: its end is a line, not the end of the case."""
    judgement, lines = run(tmp_path, case, on="decode_peer", how="exit")
    assert judgement.outcome == "skipped"
    reasons = [line.reason or "" for line in lines if isinstance(line, PeerLine)]
    assert len(reasons) == 2
    assert all("ended with exit code 7" in reason for reason in reasons)
    assert sum(line.line == "decode" for line in lines) == 2


def test_a_bar_on_a_peer_that_does_not_run_is_refused(tmp_path: Path) -> None:
    """Guards against a bar that can never be judged."""
    text = SPEC_TEXT + CHECK.replace("tokens: 10", "tokens: 10\n    peers: [transformers]")
    with pytest.raises(SpecError, match="mlx_lm is not among this check's peers"):
        load_spec(write_spec(tmp_path, text))


def test_the_page_has_each_engine_and_no_time_of_inexact_rows(case: Case) -> None:
    """Guards the page: every figure from the lines, and none where our own rows differ."""
    view = SpecView.parse(SPEC_TEXT + CHECK)
    events: Any = lines_for(case, transformers="is not installed")
    built = build_case(case.id, events, view, withhold=False, certified=certify((), {}))
    assert [(f.arm, f.ms_per_token, f.speedup, f.rows_equal) for f in built.decode[:2]] == [
        ("ours", 10.0, None, 4),
        ("mlx_lm", 40.0, 4.0, 0),
    ]
    assert [(engine.peer, engine.reason) for engine in built.engines][1] == ("transformers", "is not installed")

    record = build_record([start_line([case.id]), *events], ENV, SPEC_TEXT + CHECK)
    words = "mlx_lm takes 4.00x ours at 8, 4.00x ours at 40 tokens, 0 of 8 rows of its blocks equal its chain."
    assert f"- **Other engines.** {words}" in summary(record, "stem")
    assert "- transformers: is not installed." in not_covered(record, "stem")
    page = engines(record, "stem")
    assert "| mlx_lm | 8 | 40.00 | 40.00 | 40.00 | 10 | 4.00x | 80.00 | 2.00 | 0 of 4 | 4 of 4 | 15 of 15 |" in page
    assert "- transformers: not measured, is not installed." in page
    for wrong in (
        build_case(case.id, tuple(lines_for(case, equal=2)), view, withhold=False, certified=certify((), {})),  # type: ignore[arg-type]
        build_case(case.id, tuple(lines_for(case)), view, withhold=True, certified=certify((), {})),  # type: ignore[arg-type]
    ):
        assert all(f.ms_per_token is None and f.speedup is None for f in wrong.decode)


class Capture:
    """Stands for the output of a job."""

    case = "x::engines"

    def __init__(self) -> None:
        self.lines: list[Any] = []

    def line(self, line: Any) -> None:
        self.lines.append(line)

    def progress(self, *_: Any) -> None:
        pass


def test_ours_is_measured_on_the_nano_pair() -> None:
    """Guards the ids that every engine gets, and the comparison of our own block, which is the point of the project."""
    from harness.worker import peer_decode
    from harness.worker.bench import Bench

    with one_thread():
        setup = Setup(
            target=str(NANO / "gemma4-nano-it-4bit"), drafter=str(NANO / "gemma4-nano-it-assistant-4bit"), threads=1
        )
        out: Any = Capture()
        prompt = {"name": "code", "form": "raw", "text": "def add(a, b):"}
        args = {"prompt": prompt, "contexts": (12, 20), "tokens": 3, "rows": 4}
        data = peer_decode.run_ours(Bench(setup), args, out)
    assert data["exact"]
    assert len(data["ids"]) == 24
    kinds = [(line.line, line.context_tokens) for line in out.lines]
    assert kinds == [("block", 12), ("decode", 12), ("block", 20), ("decode", 20)]
    block, decode = out.lines[:2]
    assert (block.rows_equal, block.differing_bytes, block.repeatable) == (4, 0, True)
    assert block.total_bytes == 4 * 4096 * 2
    assert len(block.seconds) == 5
    assert len(decode.seconds) == 3
    assert decode.tokens[:8] == tuple(data["ids"][12:20])


@pytest.mark.parametrize(
    "geometry", [pytest.param(TINY, id="12b"), pytest.param(TINY_31B, id="31b", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("name", ["mlx_lm", "transformers"])
def test_a_peer_decodes_our_checkpoint(name: str, geometry: Geometry) -> None:
    """Guards the peers' side past the window: weights in their places, a cache of its own for each way to the rows."""
    pytest.importorskip(name, reason=f"{name}, a peer, is not installed")
    from harness.worker import peer_decode

    folder, ids = random_pair_dirs(3, geometry).target, [2, *range(5, 60)]
    decoder: Any = importlib.import_module(f"tools.peers.decode_{name}").load(folder, "cpu")
    tokens = list(decoder.generate(ids[:40], 5))
    found = decoder.block_rows(ids[:40], tokens[:4])
    assert found.chain_ids == tuple(tokens[1:5])
    assert found.block.shape == found.chain.shape == (4, geometry.vocab_size * 2)
    assert (found.chain == found.chain_again).all()
    bench: Any = type("Bench", (), {"device": "cpu"})()
    out: Any = Capture()
    args = {"peer": name, "target": str(folder), "ids": ids, "contexts": (8, 40), "tokens": 2, "rows": 4}
    peer_decode.run_peer(bench, args, out)
    assert [line.line for line in out.lines] == ["block", "decode", "block", "decode", "peer"]
    assert out.lines[-1].reason is None
    assert len(out.lines[0].seconds) == 5
    assert out.lines[3].tokens[:5] == tuple(tokens)
    theirs = torch.from_numpy(found.chain.copy()).view(torch.bfloat16).float()
    with one_thread():
        ours = our_rows(folder, ids[:40], tokens[:4])
    assert torch.corrcoef(torch.stack((theirs.flatten(), ours.flatten())))[0, 1] > MEANING


def our_rows(folder: Path, ids: Sequence[int], block: Sequence[int]) -> torch.Tensor:
    """Our logits [n, V] of the block's tokens after a prompt."""
    target = load_pair(folder).target
    caches = target.new_caches()
    run_prefill(target, ids, None, 512, caches)
    return torch.cat([target.step([token], caches, "classic").logits for token in block]).float()


def test_a_broken_peer_is_a_reason(tmp_path: Path) -> None:
    """Guards against a peer's exception as an error of ours."""
    pytest.importorskip("transformers", reason="transformers, a peer, is not installed")
    from harness.worker import peer_decode

    bench: Any = type("Bench", (), {"device": "cpu"})()
    out: Any = Capture()
    args = {"peer": "transformers", "target": str(tmp_path), "ids": [1], "contexts": (1,), "tokens": 2, "rows": 2}
    peer_decode.run_peer(bench, args, out)
    assert [line.peer for line in out.lines] == ["transformers"]
    assert out.lines[0].reason.startswith("CheckpointError: ")
