"""Data stage: installed text -> tokenizer and token streams in the work folder.

Writes train.npy, held_raw.npy, held_chat.npy (uint16 ids), manifest.json and tokenizer files.
"""

from __future__ import annotations

import json
import multiprocessing
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from tools.nano.chat import Conversation, conversations, doc_key, render
from tools.nano.corpus import Document, collect, installed_files, manifest
from tools.nano.tokens import tokenizer_files, train_tokenizer

TOKENIZER_BYTES = 24_000_000
CHAT_SHARE = 0.18
BATCH = 4096


def _collect_part(files: list[tuple[str, str, Path]]) -> list[Document]:
    return collect(files)


def gather(workers: int) -> tuple[list[Document], dict[str, str]]:
    """Every usable document on this machine, read by `workers` processes, and the licences of its packages."""
    files, licences = installed_files()
    parts = [files[i :: workers * 4] for i in range(workers * 4)]
    with multiprocessing.Pool(workers) as pool:
        read = [document for part in pool.map(_collect_part, parts, chunksize=1) for document in part]
    unique: dict[str, Document] = {}
    for document in sorted(read, key=lambda d: (d.package, d.name)):
        unique.setdefault(" ".join(document.text.split()), document)
    return list(unique.values()), licences


def make_conversations(documents: list[Document], workers: int) -> tuple[list[Conversation], list[Conversation]]:
    """(training, held-out) conversations; the same words never stand on both sides nor twice."""
    sources = [d for d in documents if d.name.endswith(".py")]
    with multiprocessing.Pool(workers) as pool:
        found = pool.map(conversations, [d.text for d in sources], chunksize=64)
    train: dict[bytes, Conversation] = {}
    held: dict[bytes, Conversation] = {}
    for document, items in zip(sources, found, strict=True):
        side = held if document.held_out else train
        for item in items:
            side.setdefault(doc_key(item), item)
    return list(train.values()), [item for key, item in held.items() if key not in train]


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> np.ndarray:
    """One stream of ids (uint16) of all texts, in order."""
    pieces: list[np.ndarray] = []
    for chunk in _chunks(texts):
        encoded = tokenizer.encode_batch_fast(chunk, add_special_tokens=False)
        pieces.extend(np.asarray(item.ids, dtype=np.uint16) for item in encoded)
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.uint16)


def _chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    chunk: list[str] = []
    for text in texts:
        chunk.append(text)
        if len(chunk) == BATCH:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def tokenizer_sample(documents: list[Document], chat: list[Conversation], rng: random.Random) -> list[str]:
    """A shuffled sample of training text, the size that merges are learned on."""
    texts = [d.text for d in documents if not d.held_out] + [t for c in chat[:2000] for _, t in c]
    rng.shuffle(texts)
    total, sample = 0, []
    for text in texts:
        sample.append(text)
        total += len(text)
        if total > TOKENIZER_BYTES:
            break
    return sample


def escape(text: str) -> str:
    """Raw text whose look-alikes of special tokens can no longer be read as such."""
    return text.replace("<|", "< |").replace("|>", "| >").replace("<bos>", "< bos>").replace("<eos>", "< eos>")


def build(
    work: Path,
    vocab_size: int,
    workers: int,
    seed: int,
    documents: list[Document] | None = None,
    licences: dict[str, str] | None = None,
) -> dict[str, object]:
    """Run the data stage into `work`; returns the manifest. Given documents replace the machine's own (tests)."""
    rng = random.Random(seed)
    if documents is None or licences is None:
        documents, licences = gather(workers)
    chat, held_chat = make_conversations(documents, workers)
    rng.shuffle(chat)
    tokenizer = train_tokenizer(tokenizer_sample(documents, chat, rng), vocab_size)
    work.mkdir(parents=True, exist_ok=True)
    for name, text in tokenizer_files(tokenizer).items():
        (work / name).write_text(text, encoding="utf-8")
    raw_train = [f"<bos>{escape(d.text)}<eos>" for d in documents if not d.held_out]
    raw_bytes = sum(map(len, raw_train))
    rendered, chat_bytes = [], 0
    for conversation in chat:
        if chat_bytes > CHAT_SHARE / (1 - CHAT_SHARE) * raw_bytes:
            break
        rendered.append(render([(role, escape(text)) for role, text in conversation]))
        chat_bytes += len(rendered[-1])
    mixed = raw_train + rendered
    rng.shuffle(mixed)
    held = [d for d in documents if d.held_out]
    rng.shuffle(held)
    streams = {
        "train": encode(tokenizer, mixed),
        "held_raw": encode(tokenizer, [f"<bos>{escape(d.text)}<eos>" for d in held]),
        "held_chat": encode(tokenizer, [render([(r, escape(t)) for r, t in c]) for c in held_chat]),
    }
    for name, stream in streams.items():
        np.save(work / f"{name}.npy", stream)
    report = {
        **manifest(documents, licences),
        "conversations": len(rendered),
        "conversation_share_of_bytes": round(chat_bytes / max(chat_bytes + raw_bytes, 1), 4),
        **{f"{name}_tokens": len(stream) for name, stream in streams.items()},
    }
    (work / "manifest.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report
