"""What the linter must know of texts and checkpoints: how long a prompt is, whether people wrote it, the window."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path

ENOUGH = 30  # letter pairs below which a text shows nothing
LONG_WORD = 60  # letters without a space: no word of any language, no identifier that anybody types
COMMON_PAIRS = (
    "th he in er an re nd at on nt ha es st en ed to it ou ea hi is or ti as te et ng of al de se le sa si ar ve ra ld "
    "ur me ne io co ro li ri ic el la ma ce us ho ut em il ch ll ss ee tr un om ta wi ns no ge ac ec lo di be so ow ca "
    "pe ai po wa ot pr fo fr rs ie ct ul ad im am id ir mo ke"
)
_PAIRS = frozenset(COMMON_PAIRS.split())
_WORD = re.compile(r"[A-Za-z]{2,}")
_SCRIPTS: tuple[str, ...] = (
    "LATIN",
    "CYRILLIC",
    "GREEK",
    "ARABIC",
    "HEBREW",
    "DEVANAGARI",
    "THAI",
    "HANGUL",
    "HIRAGANA",
    "KATAKANA",
)
_SCRIPTS += ("CJK", "BENGALI", "TAMIL", "TELUGU", "GEORGIAN", "ARMENIAN", "ETHIOPIC", "KHMER")


def looks_random(text: str) -> str | None:
    """Why a text does not look written by anybody, or None. Errs on the side of silence."""
    if re.search(r"(<unused\d+>|<0x[0-9A-Fa-f]{2}>|\[unused\d+\]|<\|?reserved)", text):
        return "it holds tokens that no text has"
    if "\ufffd" in text:
        return "it holds bytes that are no characters"
    words = text.split()
    numbers = [word for word in words if re.fullmatch(r"\d{2,6},?", word.strip("[]()"))]
    if len(numbers) >= 12 and len(numbers) > 0.9 * len(words) and not _steady(numbers):
        return "a list of token numbers"
    scripts = _scripts(text)
    if len(scripts) >= 5:
        return f"{len(scripts)} scripts in one text"
    if any(len(word) >= LONG_WORD and re.fullmatch(r"[A-Za-z0-9+/=]+", word) for word in words):
        return f"a run of {LONG_WORD} letters and digits without a space"
    if scripts <= {"LATIN"} and (reason := _letters(text)):
        return reason
    plain = [word.lower() for word in _WORD.findall(text)]
    if len(plain) >= 60 and len(set(plain)) > 0.97 * len(plain) and not any(sign in text for sign in ".;:,{}()"):
        return f"{len(set(plain))} different words of {len(plain)}, and no sign between them"
    return None


def _letters(text: str) -> str | None:
    """Letter pairs: words of Latin languages and of code are made of common ones, random letters are not."""
    pairs = [word[i : i + 2].lower() for word in _WORD.findall(text) for i in range(len(word) - 1)]
    if len(pairs) < ENOUGH:
        return None
    known = sum(pair in _PAIRS for pair in pairs) / len(pairs)
    return f"{100 * known:.0f} % of its letter pairs are common ones" if known < 0.3 else None


def _steady(numbers: list[str]) -> bool:
    """Numbers that rise or fall all the way are a table or a sequence, not ids."""
    values = [int(re.sub(r"\D", "", number)) for number in numbers]
    return values in (sorted(values), sorted(values, reverse=True))


def _scripts(text: str) -> set[str]:
    names = (unicodedata.name(sign, "") for sign in set(text) if sign.isalpha())
    return {script for name in names for script in _SCRIPTS if name.startswith(script)}


def sliding_window(checkpoint: Path) -> int | None:
    """The window that a checkpoint's config.json states; None where it cannot be read or states none."""
    try:
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    text = config.get("text_config")
    for part in (text, config):
        window = part.get("sliding_window") if isinstance(part, dict) else None
        if isinstance(window, int) and not isinstance(window, bool) and window > 0:
            return window
    return None


def token_counter(checkpoint: Path | None) -> Callable[[str], int]:
    """Counts tokens with the checkpoint's tokenizer; else bytes, an upper bound, so that no rule cries too early."""
    if checkpoint is not None and (checkpoint / "tokenizer.json").is_file():
        try:
            from tokenizers import Tokenizer

            tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        except Exception:  # absent, or a file of another version: a linter does without
            return _bytes
        return lambda text: len(tokenizer.encode(text).ids)
    return _bytes


def _bytes(text: str) -> int:
    return len(text.encode())
