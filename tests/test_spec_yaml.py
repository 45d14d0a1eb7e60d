"""The YAML 1.2 reader: values, marks, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import SpecError
from harness.spec.yaml12 import read_document


def read(tmp_path: Path, data: bytes | str) -> dict[str, object]:
    path = tmp_path / "x.yaml"
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    value = read_document(path, "x.yaml").value
    assert isinstance(value, dict)
    return value


def refusals(tmp_path: Path, data: bytes | str) -> list[str]:
    with pytest.raises(SpecError) as caught:
        read(tmp_path, data)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("NO", "NO"),
        ("1:30", "1:30"),
        ("1e-3", 0.001),
        ("1_000", "1_000"),
        ("010", "010"),
        ("0x10", "0x10"),
        ("2026-10-07", "2026-10-07"),
        ("-12", -12),
        ("+3", 3),
        ("0", 0),
        ("1.", 1.0),
        (".5", 0.5),
        ("1.5E+2", 150.0),
        ("true", True),
        ("FALSE", False),
        ("yes", "yes"),
        ("~", None),
        ("null", None),
        ("", None),
        ('"0"', "0"),
        ("'null'", "null"),
        (".nan", ".nan"),
        ("=", "="),
    ],
)
def test_scalars_follow_yaml_1_2(tmp_path: Path, text: str, value: object) -> None:
    """YAML 1.1 turned `off` into false, `1:30` into 90 and `1e-3` into text."""
    found = read(tmp_path, f"key: {text}\n")["key"]
    assert found == value
    assert type(found) is type(value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all examples."""
    return tmp_path_factory.mktemp("yaml")


@settings(max_examples=50)
@given(number=st.integers(-(10**40), 10**40))
def test_every_decimal_integer_reads_as_itself(folder: Path, number: int) -> None:
    """A resolver that cuts large numbers short would change a seed."""
    assert read(folder, f"key: {number}\n") == {"key": number}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("a: 1\nb: 2\na: 3\n", ["x.yaml:3:1: duplicate key 'a' (first at line 1)"]),
        ("a: {b: 1, b: 2}\n", ["x.yaml:1:11: duplicate key 'b' (first at line 1)"]),
        ("a: &x 1\n", ["x.yaml:1:4: anchor '&x' is not allowed; write the value where it is used"]),
        ("a: !!str 1\n", ["x.yaml:1:4: tag '!!str' is not allowed; write a plain value"]),
        (
            "a: !!python/object:os.system x\n",
            ["x.yaml:1:4: tag '!!python/object:os.system' is not allowed; write a plain value"],
        ),
        ("<<: {a: 1}\n", ["x.yaml:1:1: merge key '<<' is not allowed; write the keys out"]),
        ("1: a\n", ["x.yaml:1:1: a key must be a word, found 1"]),
        ("? [a]\n: b\n", ["x.yaml:1:3: a key must be a word, found a list or mapping"]),
        ("a:\n\tb: 1\n", ["x.yaml:2:1: a tab is not allowed here; indent with spaces"]),
        ("", ["x.yaml:1:1: the file is empty; `harness new NAME` writes one to start from"]),
        ("# only a comment\n", ["x.yaml:1:1: the file is empty; `harness new NAME` writes one to start from"]),
        ("- a\n", ["x.yaml:1:1: expected keys and values (schema, name, title, pair, checks), found a list"]),
        ("word\n", ["x.yaml:1:1: expected keys and values (schema, name, title, pair, checks), found plain text"]),
        (b"a: 1\nb: \xff\n", ["x.yaml:2:4: byte 0xff is not UTF-8; save the file as UTF-8"]),
        ("a: 1\nb: \x07\n", ["x.yaml:2:4: control character U+0007 is not allowed"]),
        ("a: 1\n---\nb: 2\n", ["x.yaml:2:1: a second document starts here; one spec per file"]),
        ("[" * 5000 + "]" * 5000, ["x.yaml:1:21: nested too deeply"]),
    ],
    ids=lambda value: repr(value)[:24] if isinstance(value, str | bytes) else "",
)
def test_what_is_refused_says_where_and_why(tmp_path: Path, data: bytes | str, expected: list[str]) -> None:
    """PyYAML keeps the last of two equal keys without a word, and answers the rest with a traceback."""
    assert refusals(tmp_path, data) == expected


def test_alias_is_refused_before_it_can_explode(tmp_path: Path) -> None:
    """A few nested aliases expand to gigabytes."""
    text = "a: &a [x, x]\nb: [*a, *a]\n"
    assert "x.yaml:2:5: alias '*a' is not allowed; write the value out" in refusals(tmp_path, text)


def test_broken_syntax_is_one_line(tmp_path: Path) -> None:
    """A scanner error has four lines of its own."""
    lines = refusals(tmp_path, "a: [1, 2\nb: 3\n")
    assert len(lines) == 1
    assert lines[0].startswith("x.yaml:2:2: not valid YAML: ")


@pytest.mark.parametrize("name", ["missing.yaml", ".", "missing/x.yaml", "x.yaml/y.yaml"])
def test_unreadable_path_is_one_line(tmp_path: Path, name: str) -> None:
    """A missing file must not be a traceback."""
    (tmp_path / "x.yaml").write_text("a: 1\n")
    with pytest.raises(SpecError) as caught:
        read_document(tmp_path / name, name)
    assert len(str(caught.value).splitlines()) == 1


def test_huge_file_is_refused(tmp_path: Path) -> None:
    """A checkpoint named by mistake must not be parsed for minutes."""
    assert "a spec is at most" in refusals(tmp_path, "a: " + "x" * (1 << 20))[0]


def test_byte_order_mark_is_read_over(tmp_path: Path) -> None:
    """Some editors put one there."""
    assert read(tmp_path, b"\xef\xbb\xbfa: 1\n") == {"a": 1}
