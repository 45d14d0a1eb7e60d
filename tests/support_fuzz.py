"""Generators of damaged specs and checkpoints, seeded: mutations of files that are sound.

A mutation never says what should happen; the tests hold every outcome against what is allowed.
"""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ODD_SCALARS = (
    "", "~", "null", "true", "no", ".nan", ".inf", "-.inf", "1e999", "-1e999", "-0.0", "0", "-1", "1", "2", "9",
    "1" * 400, "9" * 18, "1.5", "1e-400", "0x1F", "0o17", "1_000", "2026-11-30", "12:30:45", "[]", "{}", "[[]]", "{{}}",
    "[null]", "{a: 1}", "'", '"', '"\\ud800"', '"\\x00"', '"\\U0010FFFF"', "\u202e\u2066", "\u00e9\u0301", "\U0001f984",
    "\ufeff", "\ufffe", "\x07", "\x85", "!!int 3", "!!python/object:os.system x", "!!binary aGk=", "&a 1", "*a", "<<",
    "? x", "- x", "|", ">", "%YAML 1.2", "---", "...", "@x", "`x`", "#", ": :", "x: y: z", "x" * 3000,
    "../../etc/passwd", "/etc/passwd", "~/x", "$HOME", "a\x00b", "[" * 30, "{a: " * 30, "'\n\n'", "\t", "\r",
    "specs/../specs",
)  # fmt: skip
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 9, 10**9, 10**30, -(10**30), 0.5, -0.0, 1e308, "", " ", "0", "x", "rowwise",
    "base",
    "mtp", "\u202e", "\U0001f984", "a\nb", "x" * 5000, [], {}, [[]], [None], {"": None}, {"a": {"b": {"c": {}}}},
    [1] * 99, {"kind": "throughput"}, ["rowwise"] * 3, {"env": "PATH", "values": ["1"]},
    {"field": "id", "values": [1]},
    {"text": "x"}, {"file": "."}, {"file": "prompts"}, {"file": "prompts/code.txt\x00"}, {"path": "."}, {"grow": "12b"},
)  # fmt: skip


def mutate_text(text: str, rng: random.Random) -> str:
    """One change of a spec's text: lines, characters, scalars, whole constructs."""
    lines = text.split("\n")
    at = rng.randrange(len(lines))
    match rng.randrange(12):
        case 0:
            del lines[at]
        case 1:
            lines.insert(at, lines[at])
        case 2:
            other = rng.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        case 3:
            lines[at] = rng.choice((" ", "  ", "\t", "- ", "? ", "#", "")) + lines[at].lstrip(rng.choice((" ", "")))
        case 4:
            place = rng.randrange(len(lines[at]) + 1)
            lines[at] = lines[at][:place] + rng.choice(ODD_SCALARS) + lines[at][place:]
        case 5:
            head, colon, _ = lines[at].partition(":")
            lines[at] = f"{head}: {rng.choice(ODD_SCALARS)}" if colon else lines[at]
        case 6:
            words = lines[at].split(" ")
            words[rng.randrange(len(words))] = rng.choice(ODD_SCALARS)
            lines[at] = " ".join(words)
        case 7:
            return text[: rng.randrange(len(text) + 1)]
        case 8:
            start = rng.randrange(len(text))
            return text[:start] + text[start + rng.randrange(1, 40) :]
        case 9:
            place = rng.randrange(len(text))
            return text[:place] + rng.choice("[]{},:'\"#&*!|>%@`\n\t- \x00\x1b\u2028") + text[place:]
        case 10:
            lines.insert(
                at, rng.choice(("<<: {a: 1}", "a: &x 1", "b: *x", "? [1]\n: 2", "1: 2", "null: 3", "---", "..."))
            )
        case _:
            line = lines[at]
            lines[at] = rng.choice((line.upper(), line.swapcase(), line[::-1], line * 3, line.replace(" ", "\u00a0")))
    return "\n".join(lines)


def mutate_value(value: Any, rng: random.Random) -> Any:
    """One change somewhere in a spec's values: another type, a key gone or renamed, a list that is too long."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        copy = dict(value)
        match rng.randrange(8):
            case 0:
                del copy[key]
            case 1:
                copy[rng.choice(("x", "", "kind", "id", key + "s", key.upper(), "\u00e9", " "))] = copy.pop(key)
            case 2:
                copy[key] = rng.choice(ODD_VALUES)
            case _:
                copy[key] = mutate_value(copy[key], rng)
        return copy
    if isinstance(value, list | tuple) and value and rng.random() < 0.85:
        items = list(value)
        at = rng.randrange(len(items))
        match rng.randrange(6):
            case 0:
                del items[at]
            case 1:
                items.insert(at, items[at])
            case 2:
                items = items * rng.choice((2, 9))
            case _:
                items[at] = mutate_value(items[at], rng)
        return items
    return rng.choice(ODD_VALUES)


def excerpt(text: str, rng: random.Random) -> str:
    """A spec's head and one or two of its checks, as they stand: what is damaged stays small, so that many can be."""
    head, _, body = text.partition("\nchecks:\n")
    checks = re.split(r"\n+(?=  - )", body)
    return f"{head}\nchecks:\n" + "\n".join(rng.sample(checks, min(len(checks), rng.choice((1, 1, 1, 2)))))


def damaged_spec(texts: Sequence[str], values: Sequence[Any], rng: random.Random) -> str:
    """A spec with one to three changes, in its text or in its values (written as JSON, which is YAML)."""
    if rng.random() < 0.5:
        text = rng.choice(texts)
        text = text if rng.random() < 0.02 else excerpt(text, rng)
        for _ in range(rng.choice((1, 1, 2, 3))):
            text = mutate_text(text, rng) or "\n"
        return text
    value = dict(rng.choice(values))
    value["checks"] = rng.sample(value["checks"], min(len(value["checks"]), rng.choice((1, 1, 1, 2))))
    for _ in range(rng.choice((1, 1, 2, 3))):
        value = mutate_value(value, rng)
    return json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, 1)))


# ---- checkpoints ----------------------------------------------------------------------------------------------------

Damage = Callable[[Path, random.Random], None]
JSON_FILES = ("config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json")


def restore(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Bring a folder back to exactly these files, touching only what differs."""
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.is_dir():
            path.rmdir()
        elif path.name not in contents:
            path.unlink()
    for name, content in contents.items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != content:
            path.write_bytes(content)


def _weights(folder: Path, rng: random.Random) -> Path:
    return rng.choice(sorted(folder.glob("*.safetensors")))


def cut_file(folder: Path, rng: random.Random) -> None:
    """Any file, cut anywhere."""
    file = rng.choice(sorted(path for path in folder.iterdir() if path.stat().st_size))
    content = file.read_bytes()
    file.write_bytes(content[: rng.choice((0, 1, 7, 8, 9, 100, rng.randrange(len(content))))])


def flip_bytes(folder: Path, rng: random.Random) -> None:
    """Some bytes of any file; of weights, mostly in the header."""
    file = rng.choice(sorted(path for path in folder.iterdir() if path.stat().st_size))
    content = bytearray(file.read_bytes())
    reach = min(len(content), 4096) if file.suffix == ".safetensors" else len(content)
    for _ in range(rng.choice((1, 3, 20))):
        content[rng.randrange(reach)] = rng.randrange(256)
    file.write_bytes(content)


def remove_file(folder: Path, rng: random.Random) -> None:
    """Any file."""
    rng.choice(sorted(folder.iterdir())).unlink()


def folder_for_file(folder: Path, rng: random.Random) -> None:
    """A folder where a file should be."""
    file = rng.choice(sorted(folder.iterdir()))
    file.unlink()
    file.mkdir()


def garbage_file(folder: Path, rng: random.Random) -> None:
    """Other content under the right name."""
    file = rng.choice(sorted(folder.iterdir()))
    junk = (
        b"",
        b"null",
        b"[]",
        b"{}",
        b"3",
        b'"x"',
        b"NaN",
        b"\xff\xfe",
        b"[" * 3000,
        b"<!DOCTYPE html>" * 9,
        b"\x00" * 64,
    )
    file.write_bytes(rng.choice(junk))


def change_json(folder: Path, rng: random.Random) -> None:
    """One value of a JSON file replaced, removed or of another type."""
    present = [name for name in JSON_FILES if (folder / name).is_file()]
    file = folder / rng.choice(present)
    value = json.loads(file.read_text(encoding="utf-8"))
    for _ in range(rng.choice((1, 1, 2))):
        value = mutate_value(value, rng)
    file.write_text(json.dumps(value), encoding="utf-8")


def change_config(folder: Path, rng: random.Random) -> None:
    """One value of config.json's sections."""
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    names = ("text_config", "quantization", "rope_parameters")
    sections = [config[name] for name in names if isinstance(config.get(name), dict)] + [config]
    section = rng.choice(sections)
    key = rng.choice(list(section))
    old = section[key]
    near = [old + 1, old - 1, old * 2, -old, float(old), str(old)] if type(old) in (int, float) else []
    section[key] = rng.choice([*near, *ODD_VALUES])
    if rng.random() < 0.2:
        del section[key]
    if "quantization" in config and rng.random() < 0.5:
        config["quantization_config"] = config["quantization"]
    file.write_text(json.dumps(config), encoding="utf-8")


def change_header(folder: Path, rng: random.Random) -> None:
    """A safetensors header: dtype, shape, offsets, names, its own length."""
    file = _weights(folder, rng)
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    names = [name for name in header if name != "__metadata__"]
    name = rng.choice(names)
    entry = header[name]
    match rng.randrange(9):
        case 0:
            entry["dtype"] = rng.choice(
                ("F32", "F64", "I8", "U32", "BF16", "F99", "", None, 3, ["F32"], "C64", "F8_E4M3")
            )
        case 1:
            entry["shape"] = rng.choice(
                ([], [0], [1], [-1, 4], [2**40, 2**40], "x", None, [1.5], [[1]], entry["shape"][::-1])
            )
        case 2:
            first, last = entry["data_offsets"]
            pairs = (
                [last, first],
                [0, 0],
                [-4, last],
                [first, last + 4],
                [first],
                [first, 2**70],
                None,
                "x",
                [first, None],
            )
            entry["data_offsets"] = rng.choice(pairs)
        case 3:
            header[
                rng.choice(("x", "", "lm_head.weight", name + ".lora", "\u00e9", "model.layers.99.mlp.up_proj.weight"))
            ] = header.pop(name)
        case 4:
            del header[name]
        case 5:
            del entry[rng.choice(list(entry))]
        case 6:
            header["__metadata__"] = rng.choice((3, [], {"a": 1}, {"format": "pt"}, None, "x"))
        case 7:
            header[name] = rng.choice((None, 3, [], "x", {}))
        case _:
            other = rng.choice(names)
            header[name], header[other] = header[other], header[name]
    text = json.dumps(header).encode()
    stated = (
        len(text)
        if rng.random() < 0.8
        else rng.choice((0, 1, 2**31, 2**63, len(text) - 1, len(text) + 1, len(content)))
    )
    file.write_bytes(struct.pack("<Q", stated) + text + content[8 + length :])


def swap_shards(folder: Path, rng: random.Random) -> None:
    """Two files under each other's names, or one file twice."""
    files = sorted(folder.glob("*.safetensors"))
    one, other = rng.choice(files), rng.choice(files)
    contents = one.read_bytes(), other.read_bytes()
    other.write_bytes(contents[0])
    if rng.random() < 0.5:
        one.write_bytes(contents[1])
    if rng.random() < 0.3:
        (folder / "model-extra.safetensors").write_bytes(contents[0])
        (folder / "model.safetensors.index.json").unlink(missing_ok=True)


DAMAGES: tuple[Damage, ...] = (
    cut_file, flip_bytes, remove_file, folder_for_file, garbage_file, change_json, change_config, change_config,
    change_header, change_header, change_header, swap_shards,
)  # fmt: skip
