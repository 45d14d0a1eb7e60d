"""Counter identities: on our own rounds, and on what vLLM, SGLang and llama.cpp print, sound and damaged."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import stats
from harness.cli import run_cli
from harness.counters import IDENTITIES, Counters, Stated, applicable, generation_violations, of_rounds, violations
from harness.counters_view import as_json_lines, normalized
from harness.metrics import BadMetrics, read_counters

VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of drafts
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="gemma-4-12b-it"} 400.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="gemma-4-12b-it"} 1.7876e+09
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="gemma-4-12b-it"} 1200.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="gemma-4-12b-it"} 700.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="gemma-4-12b-it",position="0"} 320.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="gemma-4-12b-it",position="1"} 220.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="gemma-4-12b-it",position="2"} 160.0
vllm:num_requests_running{engine="0",model_name="gemma-4-12b-it"} 1.0
"""
VLLM_LOG = (
    "(APIServer pid=1) INFO 11-30 09:00:04 [metrics.py:101] SpecDecoding metrics: Mean acceptance length: 3.47, "
    "Accepted throughput: 41.20 tokens/s, Drafted throughput: 49.97 tokens/s, "
    "Accepted: 412 tokens, Drafted: 501 tokens, Per-position acceptance rate: "
    "0.940, 0.838, 0.689, Avg Draft acceptance rate: 82.2%\n"
)
SGLANG = """\
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{engine_type="unified",model_name="gemma",tp_rank="0"} 2.65
sglang:spec_accept_rate{engine_type="unified",model_name="gemma",tp_rank="0"} 0.55
sglang:gen_throughput{engine_type="unified",model_name="gemma",tp_rank="0"} 101.5
"""
SGLANG_LOG = (
    "[2026-11-30 09:00:01 TP0] Decode batch, #running-req: 1, #token: 812, token usage: 0.01, accept len: 2.65, "
    "accept rate: 0.55, cuda graph: True, gen throughput (token/s): 101.52, #queue-req: 0\n"
)
SGLANG_RESPONSE = {
    "text": "def add(a, b):",
    "meta_info": {
        "id": "0",
        "prompt_tokens": 12,
        "completion_tokens": 28,
        "spec_verify_ct": 10,
        "spec_accept_token_num": 17,
        "spec_draft_token_num": 30,
        "spec_accept_rate": 17 / 30,
        "spec_accept_length": 2.8,
        "spec_accept_histogram": [2, 3, 1, 4],
        "finish_reason": {"type": "length", "length": 28},
    },
}
LLAMA_LOG = """\
slot print_timing: id  0 | task 0 | draft acceptance = 0.76049 (  308 accepted /   405 generated), mean len =  2.52
statistics        draft-mtp: #calls(b,g,a) =    1    203    203, #gen drafts =    203, #acc drafts =   172, \
#gen tokens =    405, #acc tokens =   308, #mean acc len = 2.52, #acc rate/pos = (0.847, 0.670), dur(b,g,a) = 0.003 ms
"""
LLAMA_OLD_LOG = "draft acceptance rate = 0.57576 (  171 accepted /   297 generated)\n"
LLAMA_EXAMPLE = """\
encoded   14 tokens in    0.021 seconds, speed:  666.667 t/s
n_draft   = 8
n_predict = 130
n_drafted = 160
n_accept  = 92
accept    = 57.500%
"""
LLAMA_METRICS = """\
# TYPE llamacpp:spec_decode_num_drafts_total counter
llamacpp:spec_decode_num_drafts_total 100
llamacpp:spec_decode_num_draft_tokens_total 300
llamacpp:spec_decode_num_accepted_tokens_total 200
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 90
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 70
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 40
"""
LLAMA_JSON = {"content": "x", "timings": {"prompt_n": 9, "predicted_n": 60, "draft_n": 57, "draft_n_accepted": 41}}
OURS = {
    "line": "comparison",
    "prompt": "code",
    "block_size": 4,
    "tokens": 9,
    "accepted_per_round": [3, 0, 2],
    "drafted_per_round": [3, 3, 3],
}


@dataclass(frozen=True)
class Sample:
    """A sound sample, what it says in our terms, and damages: text to replace, by what, the identity that breaks."""

    text: str
    rate: float
    length: float | None = None
    at: tuple[float, ...] = ()
    damages: list[tuple[str, str, str]] = field(default_factory=list)


SAMPLES: dict[str, Sample] = {
    "vllm": Sample(
        VLLM,
        700 / 1200,
        2.75,
        (0.8, 0.55, 0.4),
        [
            ("} 700.0", "} 701.0", "sum of accepted_at = accepted"),
            ('position="0"} 320.0', 'position="0"} 319.0', "sum of accepted_at = accepted"),
            ("} 1200.0", "} 600.0", "drafted = accepted + rejected"),
            ("} 1200.0", "} 1600.0", "drafted <= rounds x drafts per round"),
            ("} 220.0", "} 330.0", "accepted_at never rises"),
            (
                '_total{engine="0",model_name="gemma-4-12b-it"} 400.0',
                '_total{engine="0",model_name="gemma-4-12b-it"} 310.0',
                "accepted_at[1] <= rounds",
            ),
            ("} 700.0", "} -700.0", "counts >= 0"),
        ],
    ),
    "vllm log": Sample(
        VLLM_LOG,
        412 / 501,
        3.47,
        (0.94, 0.838, 0.689),
        [
            ("82.2%", "83.2%", "acceptance_rate = accepted / drafted"),
            ("length: 3.47", "length: 2.47", "acceptance_length = 1 + sum of accepted_at"),
            ("0.838", "0.988", "accepted_at never rises"),
            ("length: 3.47", "length: 4.47", "0 <= acceptance_rate <= 1 <= acceptance_length"),
        ],
    ),
    "sglang": Sample(
        SGLANG, 0.55, 2.65, damages=[("} 2.65", "} 0.65", "0 <= acceptance_rate <= 1 <= acceptance_length")]
    ),
    "sglang log": Sample(
        SGLANG_LOG, 0.55, 2.65, damages=[("rate: 0.55", "rate: 1.55", "0 <= acceptance_rate <= 1 <= acceptance_length")]
    ),
    "sglang response": Sample(
        json.dumps(SGLANG_RESPONSE),
        17 / 30,
        2.7,
        (0.8, 0.5, 0.4),
        [
            ('"spec_accept_token_num": 17', '"spec_accept_token_num": 16', "sum of accepted_at = accepted"),
            ('"spec_draft_token_num": 30', '"spec_draft_token_num": 31', "acceptance_rate = accepted / drafted"),
            ('"completion_tokens": 28', '"completion_tokens": 29', "emitted = prefill + rounds + accepted - cut"),
            ('"spec_accept_length": 2.8', '"spec_accept_length": 2.9', "tokens per verify = emitted / rounds"),
            ("[2, 3, 1, 4]", "[3, 3, 1, 4]", "rounds = sum of the histogram"),
        ],
    ),
    "llama.cpp log": Sample(
        LLAMA_LOG,
        308 / 405,
        2.52,
        (),
        [
            ("0.76049", "0.76149", "acceptance_rate = accepted / drafted"),
            ("#mean acc len = 2.52", "#mean acc len = 2.62", "acceptance_length = 1 + accepted / rounds"),
            ("(0.847, 0.670)", "(0.847, 0.570)", "acceptance_length = 1 + sum of accepted_at"),
            ("#acc drafts =   172", "#acc drafts =   170", "rounds that accepted = accepted_at[1]"),
        ],
    ),
    "llama.cpp old log": Sample(
        LLAMA_OLD_LOG, 171 / 297, damages=[("171 accepted", "172 accepted", "acceptance_rate = accepted / drafted")]
    ),
    "llama.cpp example": Sample(
        LLAMA_EXAMPLE,
        0.575,
        damages=[
            ("n_accept  = 92", "n_accept  = 93", "acceptance_rate = accepted / drafted"),
            ("n_predict = 130", "n_predict = 30", "emitted = prefill + rounds + accepted - cut"),
        ],
    ),
    "llama.cpp metrics": Sample(
        LLAMA_METRICS,
        2 / 3,
        3.0,
        (0.9, 0.7, 0.4),
        [('position="2"} 40', 'position="2"} 41', "sum of accepted_at = accepted")],
    ),
    "llama.cpp timings": Sample(
        json.dumps(LLAMA_JSON),
        41 / 57,
        damages=[('"draft_n_accepted": 41', '"draft_n_accepted": 58', "drafted = accepted + rejected")],
    ),
    "ours": Sample(
        json.dumps(OURS) + "\n" + json.dumps(OURS) + "\n",
        5 / 9,
        1 + 5 / 3,
        (2 / 3, 2 / 3, 1 / 3),
        [('"tokens": 9', '"tokens": 10', "emitted = prefill + rounds + accepted - cut")],
    ),
}


def write(folder: Path, text: str) -> Path:
    path = folder / "metrics.txt"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sound_sample_is_read_in_our_terms_and_breaks_nothing(name: str, tmp_path: Path) -> None:
    """Guards the reading: a count taken for another one gives other figures, or a false alarm."""
    sample = SAMPLES[name]
    path = write(tmp_path, sample.text)
    found = read_counters(path)
    assert all(violations(one) == () and applicable(one) for one in found), [violations(one) for one in found]
    figures = normalized(found[0])
    assert figures.acceptance_rate == pytest.approx(sample.rate)
    assert figures.acceptance_length == (None if sample.length is None else pytest.approx(sample.length, abs=0.006))
    assert figures.accepted_at == pytest.approx(sample.at)
    assert run_cli(["counters", str(path)]) == 0


DAMAGES = [(name, *damage) for name, sample in SAMPLES.items() for damage in sample.damages]


@pytest.mark.parametrize(
    ("name", "old", "new", "identity"), DAMAGES, ids=[f"{n}-{d[0]}" for n, d in enumerate(DAMAGES)]
)
def test_one_damaged_number_breaks_a_named_identity(
    name: str, old: str, new: str, identity: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards the algebra: every engine's sample, with one number changed, is caught by the rule that is about it."""
    assert old in SAMPLES[name].text
    path = write(tmp_path, SAMPLES[name].text.replace(old, new, 1))
    broken = [violation.identity for one in read_counters(path) for violation in violations(one)]
    assert identity in broken
    assert run_cli(["counters", str(path)]) == 1
    out = capsys.readouterr().out
    assert f": {identity}: " in out
    assert "violated: " in out


BAD: dict[str, tuple[str, str]] = {
    "nothing in it": ("hello\n", ":1:1: no drafting counters; known are "),
    "a word for a number": (VLLM.replace("} 700.0", "} many"), ":7:"),
    "not a number": (VLLM.replace("} 700.0", "} NaN"), "is NaN, which is no number"),
    "infinite": (VLLM.replace("} 700.0", "} 1e400"), "is 1e400, which is no number"),
    "half a draft": (VLLM.replace("} 700.0", "} 700.5"), "a counter is 700.5; counts are whole numbers"),
    "torn labels": (VLLM.replace('engine="0",model_name="gemma-4-12b-it"} 700.0', 'engine="0} 700.0'), ":7:1: not a"),
    "twice": (VLLM + VLLM, ":14:1: "),
    "a position missing": (VLLM.replace('position="1"', 'position="3"'), "draft position 1 is missing"),
    "a position that is none": (VLLM.replace('position="1"', 'position="x"'), "has no whole number as its position"),
    "a cut log line": (VLLM_LOG[:150] + "\n", "no draft acceptance rate where it should be"),
    "an sglang line cut": (SGLANG_LOG.replace("2.65", "fast"), "`accept len:`: no number after accept len"),
    "a llama line cut": ("draft acceptance rate = 0.5\n", "accepted / N generated"),
    "statistics cut": (LLAMA_LOG.replace("#acc tokens", "#tokens"), "no number after #acc tokens"),
    "example with words": (LLAMA_EXAMPLE.replace("= 92", "= most"), ":5:1: n_accept is most"),
    "broken JSON": ('{"meta_info": {"spec_verify_ct": 3,\n', "not JSON: "),
    "JSON nested too deeply": ("[" * 100_000, "nested too deeply"),
    "JSON with a word": (json.dumps(SGLANG_RESPONSE).replace(": 17,", ': "17",'), "not a whole number"),
    "JSON with a broken histogram": (
        json.dumps(SGLANG_RESPONSE).replace("[2, 3, 1, 4]", '"2314"'),
        "not a list of whole",
    ),
    "JSON without counters": ('{"usage": {"completion_tokens": 3}}', "no drafting counters"),
    "our rounds torn": (json.dumps({**OURS, "drafted_per_round": [3]}), "two lists of counts of one length"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_exit_2_with_its_place(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a traceback, and against figures from half a file."""
    text, words = BAD[name]
    path = write(tmp_path, text)
    assert run_cli(["counters", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert err.startswith(f"{path.as_posix()}:")
    assert "internal error" not in err


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """Guards the ordinary slips: no such file, a folder, bytes of another encoding."""
    binary = tmp_path / "binary"
    binary.write_bytes(b"vllm:\xff\xfe")
    for path in (tmp_path / "absent", tmp_path, binary):
        with pytest.raises(BadMetrics, match=r":1:1: "):
            read_counters(path)
    assert run_cli(["counters"]) == 2


def test_json_lines_hold_our_names() -> None:
    """Guards what another program reads."""
    line = json.loads(as_json_lines([replace(of_rounds("x", (3, 0), (3, 3)), accepted=4)]))
    assert line["acceptance_rate"] == pytest.approx(4 / 6)
    assert line["accepted_at"] == [0.5, 0.5, 0.5]
    assert [broken["identity"] for broken in line["violated"]] == ["sum of accepted_at = accepted"]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(2, 8).flatmap(lambda k: st.tuples(st.just(k), st.lists(st.integers(0, k - 1), min_size=1, max_size=20)))
)
def test_what_a_sound_loop_counts_breaks_nothing_and_any_slip_does(case: tuple[int, list[int]]) -> None:
    """Guards false alarms on every possible generation, and a count off by one in each of them."""
    block_size, accepted = case
    drafted = [block_size - 1] * len(accepted)
    tokens = 1 + len(accepted) + sum(accepted)
    sound = of_rounds("x", accepted, drafted, tokens=tokens, block_size=block_size)
    length, rate = stats.acceptance_length(accepted), stats.acceptance_rate(accepted, drafted)
    full = replace(
        sound,
        whole_blocks=True,
        acceptance_length=Stated(length),
        acceptance_rate=Stated(rate),
        emitted_per_round=Stated(tokens / len(accepted)),
        rates_at=tuple(map(Stated, stats.accepted_at(accepted, drafted))),
        histogram_rounds=len(accepted),
        rounds_that_accepted=sum(got > 0 for got in accepted),
    )
    assert violations(full) == ()
    assert applicable(full) == len(IDENTITIES)
    assert list(generation_violations(accepted, drafted, tokens=tokens, block_size=block_size)) == []
    for slip in ({"accepted": sum(accepted) + 1}, {"rounds": len(accepted) + 1}, {"drafted": sum(drafted) - 1}):
        assert violations(replace(full, **slip))
    assert violations(replace(full, emitted=tokens + 1))


def test_a_printed_figure_agrees_within_its_last_place() -> None:
    """Guards against a rounding that is called a violation, and a violation that is called rounding."""
    assert Stated.parse("2.52").agrees(1 + 308 / 203)
    assert not Stated.parse("2.520").agrees(1 + 308 / 203)
    assert Stated.parse("82.2", 0.01).agrees(412 / 501)
    assert not Stated.parse("82.2", 0.01).agrees(0.8214)
    assert Stated.parse("0e99999").value == 0


def test_an_empty_source_is_asked_nothing() -> None:
    """Guards identities that hold on nothing and would be counted as checked."""
    assert applicable(Counters("x")) == 0
    assert violations(Counters("x")) == ()
