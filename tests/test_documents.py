"""Document files: what is read, in which order, and that every refusal is one typed line that names the file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.documents import TEXT_KEYS, DocumentFile, read_documents
from kvweave.errors import DocumentError, InvalidOption

IS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


def write(path: Path, content: str | bytes = "some text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refused(*paths: str | Path, **options: int) -> str:
    with pytest.raises(DocumentError) as caught:
        read_documents(paths, **options)
    message = str(caught.value)
    assert message.isprintable(), "one line that any terminal prints"
    assert message.endswith(".")
    return message


# --- what is read -----------------------------------------------------------------------------------------------------


def test_text_and_markdown_are_one_document_each(tmp_path: Path) -> None:
    note = write(tmp_path / "note.txt", "\n  first line\r\nsecond\rthird \n\n")
    page = write(tmp_path / "page.md", "# Heading\n\nBody\n")
    assert read_documents([page, note]) == [
        DocumentFile("page", None, "# Heading\n\nBody", page),
        DocumentFile("note", None, "first line\nsecond\nthird", note),
    ]


@pytest.mark.parametrize("name", ["a.text", "a.markdown", "README", "A.MD", "a.py", ".hidden"])
def test_a_file_named_itself_is_read_as_text_whatever_its_suffix(tmp_path: Path, name: str) -> None:
    assert [d.text for d in read_documents(write(tmp_path / name))] == ["some text"]


def test_a_folder_is_walked_in_sorted_order_without_hidden_and_unknown_files(tmp_path: Path) -> None:
    for name in ["b.md", "a/z.txt", "a/c/y.md", "a.txt", "image.png", ".git/config", "a/.hidden.md", "LICENSE"]:
        write(tmp_path / name, name)
    assert [d.text for d in read_documents([tmp_path])] == ["LICENSE", "a/c/y.md", "a/z.txt", "a.txt", "b.md"]


def test_a_folder_with_a_document_suffix_is_still_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "notes.md" / "a.txt")
    assert [d.id for d in read_documents([tmp_path])] == ["a"]


def test_paths_keep_their_order_and_may_be_strings_or_one_alone(tmp_path: Path) -> None:
    b, a = write(tmp_path / "b.md"), write(tmp_path / "a.md")
    assert [d.id for d in read_documents([str(b), a])] == ["b", "a"]
    assert read_documents(str(a)) == read_documents(a) == read_documents([a])


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    assert read_documents(write(tmp_path / "a.txt", b"\xef\xbb\xbfhello"))[0].text == "hello"


@settings(deadline=None)
@given(text=TEXT.filter(str.strip), bom=st.booleans())
def test_any_utf8_text_comes_back_with_plain_line_ends(tmp_path_factory: pytest.TempPathFactory, text: str, bom: bool):
    path = write(tmp_path_factory.mktemp("d") / "a.txt", b"\xef\xbb\xbf" * bom + text.encode())
    if text.startswith("\ufeff") and not bom:
        text = text[1:]
    if not text.strip():
        assert "empty" in refused(path)
        return
    [document] = read_documents(path)
    assert document.text == text.replace("\r\n", "\n").replace("\r", "\n").strip()


@settings(deadline=None)
@given(data=st.binary(max_size=64))
def test_any_bytes_give_a_document_or_a_typed_error(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("d")
    for name in ("a.txt", "a.jsonl"):
        path = write(folder / name, data)
        try:
            documents = read_documents(path)
        except DocumentError as error:
            message = str(error)
        else:
            message = name
            assert min(len(d.text.strip()) for d in documents) > 0
        assert name in message
        assert message.isprintable()


# --- JSONL ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", TEXT_KEYS)
@pytest.mark.parametrize("id_key", ["id", "doc_id", "_id"])
def test_jsonl_reads_the_known_keys(tmp_path: Path, key: str, id_key: str) -> None:
    path = write(tmp_path / "d.jsonl", json.dumps({id_key: "x1", "title": " A\nTitle ", key: " body\r\n"}))
    assert read_documents(path) == [DocumentFile("x1", "A Title", "body", path)]


def test_jsonl_without_ids_counts_lines_and_skips_blank_ones(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", '{"text": "one", "title": null}\n\n{"text": "two", "title": "", "id": 7}\r\n')
    assert read_documents(path) == [DocumentFile("d:1", None, "one", path), DocumentFile("7", None, "two", path)]


def test_a_jsonl_string_may_hold_unicode_line_separators(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", '{"text": "one\u2028two\x85three"}\n')
    assert read_documents(path)[0].text == "one\u2028two\x85three"


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ('{"text": "x"', "not JSON"),
        ("plain words", "column 1"),
        ('["x"]', "not a JSON object"),
        ('{"txt": "x"}', "its keys are 'txt'"),
        ("{}", "its keys are none"),
        ('{"text": null}', "has no text"),
        ('{"text": 3}', "'text' is a int"),
        ('{"text": "  "}', "'text' is empty"),
        ('{"text": "x", "title": 3}', "'title' is a int"),
        ('{"text": "x", "id": true}', "'id' is a bool"),
        ('{"text": "x", "id": " "}', "'id' is empty"),
        ('{"text": "\\ud800"}', "surrogate"),
        ('{"a\\nb": 1}', "a\\nb"),
        ("[" * 100_000, "too deep"),
        ('{"text": ' + "9" * 5_000 + "}", "too long"),
    ],
)
def test_a_bad_jsonl_line_is_named_by_its_number(tmp_path: Path, line: str, part: str) -> None:
    path = write(tmp_path / "d.jsonl", f'{{"text": "fine"}}\n\n{line}\n')
    message = refused(path)
    assert "d.jsonl' line 3" in message
    assert part in message


# --- ids --------------------------------------------------------------------------------------------------------------


def test_equal_stems_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    first, second = write(tmp_path / "a" / "x.md", "one"), write(tmp_path / "b" / "x.md", "two")
    write(tmp_path / "c.md", "three")
    assert [d.id for d in read_documents([tmp_path])] == [str(first), str(second), "c"]


def test_a_derived_id_gives_way_to_a_given_one(tmp_path: Path) -> None:
    text = write(tmp_path / "x.md", "one")
    given = write(tmp_path / "y.jsonl", '{"id": "x", "text": "two"}')
    assert [d.id for d in read_documents([given, text])] == ["x", str(text)]


def test_an_id_given_twice_is_refused_with_both_places(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", '{"id": 1, "text": "one"}\n')
    write(tmp_path / "b.jsonl", '{"text": "two"}\n{"id": "1", "text": "three"}\n')
    message = refused(tmp_path)
    assert "a.jsonl:1" in message
    assert "b.jsonl:2" in message


def test_a_file_reached_twice_is_read_once_at_its_first_place(tmp_path: Path) -> None:
    a, b = write(tmp_path / "d" / "a.md"), write(tmp_path / "d" / "b.md")
    (tmp_path / "d" / "link.md").symlink_to(a)
    (tmp_path / "again").symlink_to(tmp_path / "d")
    assert [d.path for d in read_documents([b, tmp_path / "d", tmp_path / "again"])] == [b, a]


@settings(deadline=None)
@given(names=st.lists(st.sampled_from(["x.md", "x.txt", "a/x.md", "b/x.md", "b/y.jsonl", "y.jsonl"]), unique=True))
def test_ids_are_unique_and_do_not_depend_on_the_order(tmp_path_factory: pytest.TempPathFactory, names: list[str]) -> None:
    folder = tmp_path_factory.mktemp("d")
    paths = [write(folder / name, '{"text": "t"}' if name.endswith("jsonl") else "t") for name in names]
    if not paths:
        return
    forward, backward = read_documents(paths), read_documents(paths[::-1])
    assert len({d.id for d in forward}) == len(paths)
    assert forward == backward[::-1]


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda d: d / "missing.md", "does not exist"),
        (lambda d: write(d / "file") / "below.md", "does not exist"),
        (lambda d: d / ("x" * 5000), "can't be read"),
        (lambda d: "", "empty or contains a NUL"),
        (lambda d: "a\0b", "empty or contains a NUL"),
        (lambda d: write(d / "a.txt", ""), "is empty"),
        (lambda d: write(d / "a.txt", " \n\t"), "is empty"),
        (lambda d: write(d / "a.txt", b"\xef\xbb\xbf"), "is empty"),
        (lambda d: write(d / "a.jsonl", "\n\n"), "is empty"),
        (lambda d: write(d / "a.bin", b"abc\0def"), "NUL at byte 3"),
        (lambda d: write(d / "a.txt", b"caf\xe9 au lait"), "0xe9 at byte 3"),
        (lambda d: write(d / "a.txt", b"\xef\xbb\xbfcaf\xe9"), "0xe9 at byte 6"),
        (lambda d: write(d / "a.txt", "hi".encode("utf-16")), "UTF-16"),
        (lambda d: write(d / "only.png", "x").parent, "holds no documents"),
        (lambda d: write(d / ".hidden" / "a.md").parent.parent, "holds no documents"),
        (lambda d: "/dev/null", "neither a file nor a folder"),
    ],
)
def test_an_unusable_path_is_one_line_that_says_why(tmp_path: Path, make: Callable[[Path], str | Path], part: str) -> None:
    assert part in refused(make(tmp_path))


def test_one_bad_file_in_a_folder_is_not_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "a.md")
    write(tmp_path / "b.md", "")
    assert "b.md' is empty" in refused(tmp_path)


def test_a_file_over_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "x" * 10)
    assert read_documents(path, max_bytes=10)[0].text == "x" * 10
    assert "10 bytes, the limit is 9" in refused(path, max_bytes=9)
    huge = tmp_path / "huge.txt"
    with open(huge, "wb") as file:
        file.truncate(2**40)  # sparse: reading it would take the memory of the machine
    assert "1,099,511,627,776 bytes" in refused(huge)


def test_a_file_whose_size_the_system_does_not_tell_obeys_the_limit() -> None:
    path = Path("/proc/self/status")
    if not path.exists():
        pytest.skip("needs /proc")
    assert path.stat().st_size == 0
    assert "Name:" in read_documents(path)[0].text
    assert "the limit is 5" in refused(path, max_bytes=5)


def test_no_paths_and_a_senseless_limit_are_refused(tmp_path: Path) -> None:
    assert "No document paths" in refused()
    with pytest.raises(InvalidOption, match="max_bytes is 0"):
        read_documents([tmp_path], max_bytes=0)


@pytest.mark.skipif(IS_ROOT, reason="root may read everything")
def test_a_file_without_permission_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.md")
    path.chmod(0)
    assert "may not be read" in refused(path)


@pytest.mark.parametrize("call", ["open", "os.stat", "os.listdir"])
def test_a_refusal_of_the_system_is_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def deny(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    write(tmp_path / "a.md")
    monkeypatch.setattr(f"builtins.{call}" if call == "open" else call, deny)
    with pytest.raises(DocumentError, match="may not be read") as caught:
        read_documents([tmp_path])
    monkeypatch.undo()
    assert isinstance(caught.value.__cause__, PermissionError)


def test_links_that_loop_or_point_nowhere_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "docs" / "a.md")
    (tmp_path / "docs" / "up").symlink_to(tmp_path / "docs")
    assert "links back to a folder above" in refused(tmp_path / "docs")
    (tmp_path / "self.md").symlink_to(tmp_path / "self.md")
    assert "leads back to itself" in refused(tmp_path / "self.md")
    (tmp_path / "gone.md").symlink_to(tmp_path / "nowhere")
    assert "link to a file that does not exist" in refused(tmp_path / "gone.md")


def test_a_broken_link_of_unknown_type_in_a_folder_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "a.md")
    (tmp_path / "lock.pid").symlink_to(tmp_path / "nowhere")
    assert [d.id for d in read_documents([tmp_path])] == ["a"]
    (tmp_path / "b.md").symlink_to(tmp_path / "nowhere")
    assert "b.md" in refused(tmp_path)


def test_file_names_may_hold_anything(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"bad\xff\nname.md")
    try:
        write(path)
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    assert read_documents(tmp_path)[0].id.encode()
    path.write_bytes(b"")
    assert "is empty" in refused(tmp_path)


def test_reading_documents_needs_no_torch() -> None:
    code = "import sys, kvweave.documents; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
