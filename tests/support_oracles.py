"""Tiny Gemma 4 pairs inside transformers: what the engine's logits, ids and drafts are compared with.

`oracle("12b", window)` builds target and assistant once per test run, saves both with `save_pretrained`, and keeps
the models; everything is fp32 and eager. Import it only where transformers is installed.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from support_engine import generated, scratch_folder
from support_geometry import (
    Config,
    Geometry,
    Tensors,
    drafter_shapes,
    random_weights,
    target_shapes,
    text_config,
)
from torch import Tensor

if TYPE_CHECKING:
    from engine.pair import Pair

FAMILIES = {
    "12b": Geometry(
        "oracle_12b",
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=12,
        head_dim=16,
        global_head_dim=32,
        drafter_hidden_size=48,
        max_position_embeddings=512,
    ),
    "31b": Geometry(
        "oracle_31b",
        model_type="gemma4",
        vocab_size=300,
        hidden_size=80,
        intermediate_size=144,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_global_key_value_heads=2,
        head_dim=16,
        global_head_dim=32,
        drafter_hidden_size=40,
        max_position_embeddings=512,
    ),
}
"""12B: one KV head in full layers. 31B: several, another head ratio, sizes that are no powers of 2."""

SCORE_SPREAD = 1.5
"""Attention flat enough that sums in another order stay 5 times below the tolerance over 12 layers."""

DRAFTS = 5
"""Tokens that transformers' assistant proposes in a round."""


@dataclass(frozen=True)
class Oracle:
    """A pair in transformers, and the folders that it was saved to."""

    geometry: Geometry
    target: Any
    assistant: Any
    target_dir: Path
    drafter_dir: Path

    def forward(self, tokens: Sequence[int]) -> Any:
        """One forward over all tokens: logits [1, n, V], hidden_states, shared_kv_states."""
        with torch.inference_mode():
            return self.target(
                torch.tensor([list(tokens)]), output_hidden_states=True, return_shared_kv_states=True, use_cache=True
            )

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits at every position [n, V]."""
        logits: Tensor = self.forward(tokens).logits[0]
        return logits

    def bf16_logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits [n, V] of the saved model loaded in bf16 (`.to` would round the rotary frequencies as well)."""
        model = (
            type(self.target).from_pretrained(self.target_dir, dtype=torch.bfloat16, attn_implementation="eager").eval()
        )
        with torch.inference_mode():
            logits: Tensor = model(torch.tensor([list(tokens)])).logits[0]
        return logits

    def greedy(self, prompt: Sequence[int], count: int) -> tuple[int, ...]:
        """The ids that `generate` appends, no stop token."""
        return self._generate(prompt, count)

    def first_round(self, prompt: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """(carried token, the assistant's drafts for it) of the first round of assisted generation."""
        drafts: list[int] = []
        hook = self.assistant.register_forward_hook(
            lambda module, args, output: drafts.append(int(output.logits[0, -1].argmax()))
        )
        try:
            ids = self._generate(prompt, DRAFTS + 2, assistant_model=self.assistant)
        finally:
            hook.remove()
        return ids[0], tuple(drafts[:DRAFTS])

    def draft_step(
        self, token: int, g: Tensor, shared: dict[str, tuple[Tensor, Tensor]], position: int
    ) -> tuple[Tensor, Tensor]:
        """One call of the assistant: token, g [B], K/V [1, Hkv, K, D] per layer type -> (logits [V], next g [B])."""
        with torch.inference_mode():
            embedded = self.target.get_input_embeddings()(torch.tensor([[token]]))
            out = self.assistant(
                inputs_embeds=torch.cat((embedded, g.view(1, 1, -1)), -1),
                position_ids=torch.tensor([[position]]),
                shared_kv_states=shared,
                attention_mask=None,
            )
        return out.logits[0, -1], out.last_hidden_state[0, -1]

    def _generate(self, prompt: Sequence[int], count: int, **options: Any) -> tuple[int, ...]:
        return generated(self.target, prompt, count, **options)


@functools.cache
def oracle(family: str, window: int) -> Oracle:
    """The pair of a family at a window, built on first use."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    geometry = replace(FAMILIES[family], sliding_window=window)
    folder = Path(tempfile.mkdtemp(prefix=f"{geometry.name}-{window}-", dir=scratch_folder()))
    prefix = "Gemma4Unified" if geometry.model_type == "gemma4_unified" else "Gemma4"
    text_class = getattr(transformers, f"{prefix}TextConfig")
    target_config = text_class(**_arguments(text_config(geometry)))
    assistant_config = getattr(transformers, f"{prefix}AssistantConfig")(
        backbone_hidden_size=geometry.hidden_size, text_config=text_class(**_arguments(text_config(geometry, True)))
    )
    target_config._attn_implementation = assistant_config._attn_implementation = "eager"
    target = _filled(
        getattr(transformers, f"{prefix}ForCausalLM")(target_config),
        random_weights(target_shapes(geometry), 11, SCORE_SPREAD),
    )
    assistant = _filled(
        getattr(transformers, f"{prefix}AssistantForCausalLM")(assistant_config),
        random_weights(drafter_shapes(geometry), 12, SCORE_SPREAD),
    )
    assistant.generation_config.num_assistant_tokens = DRAFTS
    target.save_pretrained(folder / "target", max_shard_size="200KB")
    assistant.save_pretrained(folder / "assistant")
    return Oracle(geometry, target, assistant, folder / "target", folder / "assistant")


def load_oracle_pair(case: Oracle) -> Pair:
    """The saved pair, loaded by the engine in fp32."""
    from engine.dispatch import DispatchPolicy
    from engine.pair import load_pair

    return load_pair(case.target_dir, case.drafter_dir, DispatchPolicy(), dtype=torch.float32)


def _arguments(config: Config) -> Config:
    return {key: value for key, value in config.items() if key not in ("model_type", "enable_moe_block")}


def _filled(model: Any, weights: Tensors) -> Any:
    """The model with our weights; every parameter and every layer_scalar must be among them."""
    missing, unexpected = model.load_state_dict(weights, strict=False)
    unset = [name for name in missing if not name.endswith(("lm_head.weight", "inv_freq", "embed_scale"))]
    assert not unset, f"not among the random weights: {unset}"
    assert not unexpected, f"transformers does not know {unexpected}"
    model.tie_weights()
    return model.eval()
