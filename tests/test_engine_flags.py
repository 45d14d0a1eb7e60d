"""The flag registry: defaults, every form of a value, and what is refused with which words."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from engine.flags import FLAGS, UNSUPPORTED, FlagError, Flags, check_flag, flags_markdown, read_flags

SWITCHES = [name for name, flag in FLAGS.items() if flag.is_switch]


def test_an_empty_environment_gives_the_defaults() -> None:
    """The registry's defaults and the dataclass's are one."""
    reading = read_flags({})
    assert reading.values == Flags()
    assert set(reading.requested.values()) == {None}
    assert reading.effective["MLXCEL_PREFILL_CHUNK"] == "2048"
    assert reading.effective["MLXCEL_MTP_ALLOW_INEXACT"] == "0"
    assert {flag.field for flag in FLAGS.values()} == {field.name for field in dataclasses.fields(Flags)}


@pytest.mark.parametrize("name", SWITCHES)
def test_switches_take_the_reference_system_s_words(name: str) -> None:
    """`off` and `False` must not be read as on."""
    field = FLAGS[name].field
    for text, value in (("0", False), ("false", False), ("NO", False), ("Off", False), ("1", True), (" yes ", True)):
        reading = read_flags({name: text})
        assert getattr(reading.values, field) is value
        assert reading.requested[name] == text
        assert reading.effective[name] == str(int(value))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MLXCEL_QMV_MULTIROW", ""),
        ("MLXCEL_QMV_MULTIROW", "2"),
        ("MLXCEL_SDPA_VECTOR_LARGE_D", "nope"),
        ("MLXCEL_QMV_MULTIROW_MAX_ROWS", "0"),
        ("MLXCEL_QMV_MULTIROW_MAX_ROWS", "9"),
        ("MLXCEL_QMV_MULTIROW_MAX_ROWS", "4.0"),
        ("MLXCEL_PREFILL_CHUNK", "-1"),
        ("MLXCEL_PREFILL_CHUNK", "2k"),
        ("MLXCEL_PREFILL_CHUNK", "٣"),
    ],
)
def test_a_malformed_value_is_refused_with_the_allowed_ones(name: str, value: str) -> None:
    """A value that silently became the default would be a wrong benchmark."""
    with pytest.raises(FlagError, match="allowed values are"):
        read_flags({name: value})
    assert check_flag(name, value) == f"{name}={value!r}: allowed values are {FLAGS[name].values}"


def test_counts() -> None:
    """Numbers are read as numbers, at both ends."""
    reading = read_flags({"MLXCEL_PREFILL_CHUNK": "0", "MLXCEL_QMV_MULTIROW_MAX_ROWS": "1"})
    assert (reading.values.prefill_chunk, reading.values.qmv_multirow_max_rows) == (0, 1)
    assert check_flag("MLXCEL_QMV_MULTIROW_MAX_ROWS", "8") is None
    assert check_flag("MLXCEL_PREFILL_CHUNK", None) is None


def test_unknown_flags_get_a_suggestion() -> None:
    """A typo in a flag name would leave the default in place and the record none the wiser."""
    error = check_flag("MLXCEL_QMV_MULTROW", "0")
    assert error == "unknown flag MLXCEL_QMV_MULTROW; did you mean MLXCEL_QMV_MULTIROW?"
    assert "known flags: MLXCEL_QMV_MULTIROW, " in (check_flag("PATH", "0") or "")


@pytest.mark.parametrize("name", ["MLX_CUDA_USE_CUDNN_SDPA", "MLXCEL_SDPA_FALLBACK_MAX_QUERIES"])
def test_flags_without_a_counterpart_are_refused_with_the_reason(name: str) -> None:
    """Ignoring such a flag would put a cell into a matrix that measures nothing."""
    assert check_flag(name, "0") == f"{name} has no counterpart here: {UNSUPPORTED[name]}"
    assert check_flag(name, None) is not None
    with pytest.raises(FlagError, match="no counterpart"):
        read_flags({name: "1"})


def test_markdown_names_every_flag() -> None:
    """The documentation's table is the registry."""
    table = flags_markdown()
    assert all(f"| `{name}` |" in table for name in FLAGS)
    assert len(table.splitlines()) == len(FLAGS) + 2
    assert not set(FLAGS) & set(UNSUPPORTED)


def test_reads_the_process_environment_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent checks flags; loading torch for that would take seconds."""
    monkeypatch.setenv("MLXCEL_SDPA_VECTOR_LARGE_D", "off")
    assert read_flags().values == Flags(sdpa_large_d=False)
    program = "import sys, engine.flags; print(sorted({'torch', 'numpy', 'yaml'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
