"""Records on disk: nothing is overwritten, nothing is lost by a kill, nothing personal is kept."""

from __future__ import annotations

import getpass
import re
import socket
from pathlib import Path

import pytest
import support_record as support

from harness.errors import RecordError
from harness.record.lines import CaseLine, EndLine
from harness.record.privacy import Scrubber, leaks
from harness.record.report import check
from harness.record.store import RecordPaths, RecordStore, read_lines, slug


def create(out: Path) -> RecordStore:
    return RecordStore.create(out, "gemma4_nano", "cpu", support.DATE, support.SPEC_TEXT)


def test_a_second_run_on_one_day_gets_its_own_stem(tmp_path: Path) -> None:
    """A run that overwrites the morning's record destroys evidence."""
    first = support.write_record(tmp_path, support.run_lines())
    kept = {
        path: path.read_bytes() for path in sorted(tmp_path.rglob("*")) if path.is_file() and path.name != "README.md"
    }
    second = support.write_record(tmp_path, support.run_lines(support.SCENARIOS["slower"]))
    third = create(tmp_path)
    assert [store.paths.stem for store in (first, second, third)] == [
        "gemma4-nano-cpu-2026-11-30",
        "gemma4-nano-cpu-2026-11-30-2",
        "gemma4-nano-cpu-2026-11-30-3",
    ]
    assert {path: path.read_bytes() for path in kept} == kept


def test_a_page_without_data_also_holds_its_stem(tmp_path: Path) -> None:
    """A page somebody moved here by hand is as untouchable as a record of ours."""
    (tmp_path / "gemma4-nano-cpu-2026-11-30.md").write_text("mine", encoding="utf-8")
    assert create(tmp_path).paths.stem.endswith("-2")


def test_two_runs_that_start_together_never_share_a_folder(tmp_path: Path) -> None:
    """The claim is the folder's creation, so both cannot hold one stem even before anything is written."""
    stems = [create(tmp_path).paths.stem for _ in range(4)]
    assert len(set(stems)) == 4


def test_each_line_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    """Buffered lines die with a killed process."""
    store = create(tmp_path)
    for count, line in enumerate(support.run_lines()[:5], start=1):
        store.append(line)
        assert len(read_lines(store.paths.runs).lines) == count
    store.close()


@pytest.mark.parametrize("tail", ['{"line":"arm","case":"spe', "{", '{"line":"ca\\u00'])
def test_a_torn_last_line_is_dropped_and_reported(tmp_path: Path, tail: str) -> None:
    """A kill in the middle of a write must not make the whole file unreadable."""
    lines = support.killed_lines()
    store = support.write_record(tmp_path, lines, torn=tail, finish=False)
    raw = read_lines(store.paths.runs)
    assert raw.torn
    assert list(raw.lines) == lines


def test_a_whole_last_line_without_line_end_counts(tmp_path: Path) -> None:
    """Cut between the JSON and its line end, the line itself is still sound."""
    lines = support.run_lines()[:4]
    store = support.write_record(tmp_path, lines[:3], torn=lines[3].model_dump_json(), finish=False)
    raw = read_lines(store.paths.runs)
    assert not raw.torn
    assert list(raw.lines) == lines
    resumed = RecordStore.resume(store.paths.data)
    resumed.append(lines[0])
    resumed.close()
    assert list(read_lines(store.paths.runs).lines) == [*lines, lines[0]]


def test_a_bad_line_in_the_middle_is_an_error_with_its_place(tmp_path: Path) -> None:
    """Only the last line can be torn; anything else is damage that must not be skipped over."""
    store = support.write_record(tmp_path, support.run_lines()[:4], finish=False)
    text = store.paths.runs.read_text(encoding="utf-8").splitlines()
    text[1] = text[1][:-9]
    store.paths.runs.write_text("\n".join(text) + "\n", encoding="utf-8")
    with pytest.raises(RecordError, match=r"runs\.jsonl:2: not a raw line"):
        read_lines(store.paths.runs)


def test_a_misspelt_key_is_an_error_and_not_a_gap(tmp_path: Path) -> None:
    """`decode_sec` for `decode_s` must not become an arm without a time."""
    store = support.write_record(tmp_path, support.run_lines()[:2], finish=False)
    text = store.paths.runs.read_text(encoding="utf-8").replace('"ready_s"', '"ready_sec"')
    store.paths.runs.write_text(text, encoding="utf-8")
    with pytest.raises(RecordError, match="ready_s"):
        read_lines(store.paths.runs)


def test_resume_cuts_the_torn_tail_and_goes_on(tmp_path: Path) -> None:
    """Appending behind half a line would make one bad line out of two."""
    lines = support.killed_lines()
    store = support.write_record(tmp_path, lines, torn='{"line":"arm","case":"spe')
    assert "partial record, 21 of 22 cases finished" in store.paths.page.read_text(encoding="utf-8")
    resumed = RecordStore.resume(store.paths.page)
    assert resumed.lines == lines
    resumed.append(support.start_line(support.all_ids(), resumed=True))
    for line in support.throughput_lines(support.Scenario()):
        resumed.append(line)
    resumed.append(EndLine(ended_utc=f"{support.DATE}T09:20:00Z", exit_code=0))
    page = resumed.finish().read_text(encoding="utf-8")
    assert page.count("faster than classic, byte-identical (CPU") == 1
    assert "Partial record" not in page
    record = support.stored_json(resumed)
    decode = next(case for case in record["cases"] if case["check"] == "decode")
    assert [repeat["repeat"] for repeat in decode["arms"][0]["repeats"]] == [0, 1, 2]
    assert record["resumed"] == 1
    assert check(resumed.paths.page) == []


def test_prose_written_on_a_partial_page_survives_the_resume(tmp_path: Path) -> None:
    """A reviewer's note on the partial record is not ours to drop."""
    store = support.write_record(tmp_path, support.killed_lines())
    page = store.paths.page
    page.write_text(page.read_text(encoding="utf-8") + "\n## Reading the result\n\nThe fan died.\n", encoding="utf-8")
    resumed = RecordStore.resume(page)
    resumed.finish()
    assert page.read_text(encoding="utf-8").endswith("## Reading the result\n\nThe fan died.\n")


def test_a_run_that_wrote_nothing_still_gets_a_readable_page(tmp_path: Path) -> None:
    """A gate that fails before the first line must not leave a folder that `harness report` trips over."""
    store = create(tmp_path)
    page = store.finish().read_text(encoding="utf-8")
    assert "Nano pair: partial record, 0 of 0 cases finished" in page
    assert check(store.paths.page) == []


@pytest.mark.parametrize(
    ("given", "part"), [("nothing.md", "no raw lines"), ("data/nothing", "no raw lines"), ("elsewhere", "not a record")]
)
def test_what_is_no_record_is_named(tmp_path: Path, given: str, part: str) -> None:
    """A mistyped path must say what was expected there."""
    with pytest.raises(RecordError, match=part):
        RecordPaths.locate(tmp_path / given)


def test_page_folder_and_file_lead_to_the_same_record(tmp_path: Path) -> None:
    """`harness report` takes whichever of them a shell completes first."""
    paths = support.write_record(tmp_path, support.run_lines()).paths
    assert RecordPaths.locate(paths.page) == RecordPaths.locate(paths.data) == RecordPaths.locate(paths.runs) == paths


def test_an_output_folder_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    """--out pointing at a file: one line, no traceback."""
    (tmp_path / "taken").write_text("", encoding="utf-8")
    with pytest.raises(RecordError, match="choose another with --out"):
        create(tmp_path / "taken")


@pytest.mark.parametrize(
    ("text", "stem"),
    [
        ("gemma4_nano", "gemma4-nano"),
        ("NVIDIA H200 (sm_90)", "nvidia-h200-sm-90"),
        ("///", "record"),
        ("Ärger 2", "rger-2"),
    ],
)
def test_stems_are_plain(text: str, stem: str) -> None:
    """A GPU's name must not put spaces, slashes or brackets into links."""
    assert slug(text) == stem


def test_nothing_personal_is_written(tmp_path: Path) -> None:
    """A home folder in a command line or a log would publish a user's name with every record."""
    home, here = str(Path.home()), str(Path.cwd())
    store = create(tmp_path)
    store.write_env({**support.ENV, "command": f"harness run {home}/specs/gemma4_nano.yaml"})
    start, *rest = support.run_lines()
    store.append(start.model_copy(update={"command": f"{here}/.venv/bin/harness run --out {home}/records"}))
    for line in rest:
        reason = f"see {home}/x and /home/user/models/a"
        store.append(line.model_copy(update={"reason": reason}) if isinstance(line, CaseLine) else line)
    (store.logs / "default.log").write_text(
        f'File "{here}/engine/target.py", line 3\n{home}/.cache\n', encoding="utf-8"
    )
    store.finish()
    names = {home, here, "/home/user"}
    words = {getpass.getuser(), socket.gethostname().partition(".")[0]}
    given = support.SPEC_TEXT + str(support.ENV) + "".join(line.model_dump_json() for line in support.run_lines())
    for file in sorted(tmp_path.rglob("*")):
        text = file.read_text(encoding="utf-8") if file.is_file() else file.name
        assert not [name for name in names if re.search(rf"{re.escape(name)}(?![\w-])", text)], file
        for word in words:
            if not re.search(rf"\b{re.escape(word)}\b", given):
                assert not re.search(rf"\b{re.escape(word)}\b", text), (file, word)
    assert (store.logs / "default.log").read_text(encoding="utf-8") == 'File "engine/target.py", line 3\n~/.cache\n'
    assert check(store.paths.page) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("/home/user/x", ["/home/user"]),
        ('{"p": "C:\\\\Users\\\\user\\\\x"}', ["C:\\\\Users\\\\user"]),
        ("/Users/user and /root/models", ["/Users/user", "/root"]),
        ("the root mean square of /homely/data", []),
    ],
)
def test_personal_paths_of_any_system_are_seen(text: str, found: list[str]) -> None:
    """The checker runs in CI, where the author's home is not the current one."""
    assert leaks(text) == found
    assert leaks(Scrubber("/repo", "/nowhere").scrub(text)) == []


def test_scrubbing_touches_whole_folders_only() -> None:
    """`/srv/repo2` is not inside `/srv/repo`, and a short root must not eat words."""
    scrub = Scrubber("/srv/repo", "/srv/home/user").scrub
    assert scrub("/srv/repo/specs/x.yaml in /srv/repo2 at /srv/repo") == "specs/x.yaml in /srv/repo2 at ."
    assert scrub("/srv/home/user/a /srv/home/user2/a") == "~/a /srv/home/user2/a"
