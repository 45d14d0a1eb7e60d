"""Field cases of checkpoints: what loads, what is refused, and what a record says of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import support_broken as broken
import support_engine as build
import torch
from support_faults import Delegate
from support_geometry import TINY, Tensors, drafter_config, target_config

from engine.checkpoint import open_checkpoint
from engine.config import config_role, parse_target_config
from engine.dispatch import DispatchPolicy
from engine.errors import CheckpointError, ConfigError
from engine.pair import Pair, load_pair
from engine.quantize import quantize
from engine.requests import GenerationRequest
from engine.speculative import speculative_decode
from engine.stats import Generation, Timing
from harness import provenance
from harness.record.sections.context import _model_words
from harness.spec.pair_model import CheckpointRef
from harness.worker.bench import PromptInput
from harness.worker.parity import compare

PARTS = ("weight", "scales", "biases")
NANO = Path(__file__).parent.parent / "specs" / "checkpoints"


@pytest.fixture(scope="module", autouse=True)
def single_threaded() -> Iterator[None]:
    with build.one_thread():
        yield


def load(dirs: build.PairDirs) -> Pair:
    return load_pair(dirs.target, dirs.drafter, DispatchPolicy())


def under_another_prefix(tensors: Tensors) -> None:
    """A drafter whose tensors carry the name that they had inside a target."""
    for name in list(tensors):
        tensors[f"mtp.{name}"] = tensors.pop(name)


def narrow_input(tensors: Tensors) -> None:
    """An input projection for hidden + backbone instead of twice the backbone."""
    parts = quantize(torch.zeros(64, 64 + 128, dtype=torch.bfloat16), 4)
    tensors.update({f"pre_projection.{name}": part for name, part in zip(PARTS, parts, strict=True)})


def narrow_float_input(folder: Path) -> None:
    """The same in a drafter that is not quantized."""
    shutil.rmtree(folder)
    shutil.copytree(build.random_pair_dirs(drafter_bits=None).drafter, folder)
    narrow = {"pre_projection.weight": torch.zeros(64, 64 + 128, dtype=torch.bfloat16)}
    broken.edit_tensors(folder, lambda tensors: tensors.update(narrow))


DRAFTERS = {
    "float weights under a 4-bit config": (broken.unpack_weights, ("weight", "BF16", "4-bit")),
    "packed weights under a float config": (broken.forget_quantization, ("weight", "packed", "not quantized")),
    "another prefix": (lambda folder: broken.edit_tensors(folder, under_another_prefix), ("embed_tokens.weight",)),
    "input width of another model": (
        lambda folder: broken.edit_tensors(folder, narrow_input),
        ("pre_projection.weight", "192 inputs", "256 inputs", "backbone_hidden_size"),
    ),
    "float input width of another model": (
        narrow_float_input,
        ("pre_projection.weight", "[64, 192]", "[64, 256]", "backbone_hidden_size"),
    ),
}


@pytest.mark.parametrize("name", DRAFTERS, ids=lambda name: name.replace(" ", "-"))
def test_a_drafter_that_would_draft_garbage_does_not_load(tmp_path: Path, name: str) -> None:
    """Such drafters once loaded and accepted nothing, which reads like a bad drafter: the tensor is named instead."""
    spoil, says = DRAFTERS[name]
    dirs = broken.copy_pair(tmp_path)
    spoil(dirs.drafter)
    with pytest.raises(CheckpointError) as caught:
        load(dirs)
    broken.assert_one_line(caught.value, "tiny-it-assistant", *says)


@pytest.mark.parametrize("model_type", ["gemma4", "gemma4_unified", "gemma4_text", "gemma4_unified_text"])
def test_every_alias_of_the_target_is_one_and_an_unknown_one_is_refused(model_type: str) -> None:
    """A unified type that was not in a list once fell through to a path without drafts."""
    raw = {**target_config(TINY), "model_type": model_type}
    assert config_role(raw) == "target"
    assert parse_target_config(raw).layers == parse_target_config(target_config(TINY)).layers
    with pytest.raises(ConfigError, match="unknown model_type 'gemma4_foo'; known: gemma4,"):
        parse_target_config({**raw, "model_type": "gemma4_foo"})
    assert config_role(drafter_config(TINY)) == "drafter"


def test_a_drafter_with_a_permuted_vocabulary_falls_below_an_acceptance_floor() -> None:
    """Sizes fit and the text is right, so only the counters can tell; on the trained pair they do."""
    pair = load_pair(NANO / "gemma4-nano-it-4bit", NANO / "gemma4-nano-it-assistant-4bit")
    assert pair.tokenizer is not None
    assert pair.drafter is not None
    request = GenerationRequest(
        tuple(pair.tokenizer.encode_raw("def count_words(path):\n    with open(path) as handle:\n        ")), 24
    )

    class Permuted(Delegate):
        def draft(self, token, hidden, shared, count):  # type: ignore[no-untyped-def]
            return [(draft + 1) % 4096 for draft in self.base.draft(token, hidden, shared, count)]

    sound = speculative_decode(pair.target, pair.drafter, request, 4, 0)
    faulty = speculative_decode(pair.target, Permuted(pair.drafter), request, 4, 0)  # type: ignore[arg-type]
    assert sound.tokens == faulty.tokens
    assert sound.rounds is not None
    assert faulty.rounds is not None
    assert sound.rounds.acceptance_rate >= 0.3
    assert faulty.rounds.acceptance_rate < 0.05


def test_a_revised_chat_template_is_another_fingerprint(tmp_path: Path) -> None:
    """A template revised upstream gives other prompts under the same weights; the record has to show it."""
    folder = broken.copy_pair(tmp_path).target
    before = open_checkpoint(folder).fingerprint()
    assert open_checkpoint(build.random_pair_dirs().drafter).fingerprint()["text_sha256"] is None
    for name, text in (("chat_template.jinja", "{{ bos_token }}x"), ("generation_config.json", '{"eos_token_id": 5}')):
        (folder / name).write_text(text, encoding="utf-8")
        after = open_checkpoint(folder).fingerprint()
        assert after["text_sha256"] != before["text_sha256"]
        assert {**after, "text_sha256": None} == {**before, "text_sha256": None}
        before = after
    assert f"tokenizer and template SHA-256 {before['text_sha256'][:12]}" in _model_words({"fingerprint": before})


def test_a_record_is_not_resumed_under_another_chat_template(tmp_path: Path) -> None:
    """Half a run before the revision and half after it would be one record; parent and child hash the same files."""
    folder = broken.copy_pair(tmp_path).target
    ref = CheckpointRef(path=folder.name)
    before = provenance.checkpoint(ref, folder)
    assert before is not None
    assert before["text_sha256"] == open_checkpoint(folder).fingerprint()["text_sha256"]
    (folder / "chat_template.jinja").write_text("{{ bos_token }}x", encoding="utf-8")
    after = provenance.checkpoint(ref, folder)
    assert after is not None
    assert after["text_sha256"] == open_checkpoint(folder).fingerprint()["text_sha256"]
    envs = ({"checkpoints": {"target": found}} for found in (before, after))
    assert provenance.changed_parts(*envs) == ["checkpoints.target"]


class Speller:
    """A bench that decodes two different ids to the same letter."""

    def text(self, tokens: tuple[int, ...]) -> str:
        return "".join("a" if token in (1, 2) else chr(97 + token) for token in tokens)


@pytest.mark.parametrize(
    ("ours", "theirs", "first"),
    [((5, 1, 7), (5, 2, 7), 1), ((5, 1), (5, 1, 7), 2), ((5, 1, 7), (5, 1), 2), ((5,), (), 0)],
    ids=["same-text", "one-more", "one-less", "nothing"],
)
def test_outputs_are_compared_by_ids_and_to_the_longer_one_s_end(
    ours: tuple[int, ...], theirs: tuple[int, ...], first: int
) -> None:
    """Comparing pairwise ends with the shorter output; comparing text takes other ids that spell alike for equal."""
    prompt = PromptInput("p", "raw", (1, 2), None)
    classic, mtp = (Generation(tokens, "length", Timing(0.1, 0.2)) for tokens in (ours, theirs))
    line = compare(Speller(), "c", prompt, 4, classic, mtp)  # type: ignore[arg-type]
    assert (line.identical, line.first_difference) == (False, first)
    assert line.tokens == len(theirs)
    assert line.classic_sha256 != line.mtp_sha256
    assert compare(Speller(), "c", prompt, 4, classic, classic).identical  # type: ignore[arg-type]
