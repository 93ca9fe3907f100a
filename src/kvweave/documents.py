"""Document files as a user names them on the command line: text, Markdown and JSONL, from files and folders.

Reading is strict. A file that can't be used raises one :class:`~kvweave.errors.DocumentError` that names the file and
says what to do, because an answer given without one of the documents would look like any other answer.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kvweave.errors import DocumentError, InvalidOption

TEXT_SUFFIXES = (".txt", ".text", ".md", ".markdown", "")
JSONL_SUFFIX = ".jsonl"
TEXT_KEYS = ("text", "contents", "content", "body")
ID_KEYS = ("id", "doc_id", "_id")

_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True)
class DocumentFile:
    """One document: a whole text or Markdown file, or one line of a JSONL file.

    ``id`` is unique among the documents read together: the id in the JSONL record, else the file's stem (JSONL:
    ``stem:line``), else, where two are equal, the file's path. ``title`` comes from a JSONL record only; a heading in a
    Markdown file stays part of ``text``. ``text`` has ``\\n`` line ends and no white space around it, so that equal
    documents are equal whatever editor wrote them.
    """

    id: str
    title: str | None
    text: str
    path: Path


@dataclass(frozen=True)
class _Found:
    """A document before its id is settled."""

    document: DocumentFile
    id_is_given: bool
    line: int | None

    @property
    def place(self) -> str:
        return _show(self.document.path) + ("" if self.line is None else f":{self.line}")


def read_documents(paths: str | Path | Sequence[str | Path], *, max_bytes: int = 64 * 2**20) -> list[DocumentFile]:
    """Read the documents in ``paths``, in the order given.

    A folder is walked recursively, names sorted, hidden files and folders and files of an unknown type left out. A file
    named itself is always read: as JSONL if its name ends in ``.jsonl``, else as text. A file that is reached twice
    (named twice, or through a link) is read once, at its first place.

    Args:
        paths: files and folders; a single one may stand alone.
        max_bytes: the largest file accepted, in bytes; checked before a file is read.

    Raises:
        DocumentError: a path is missing or unreadable, a link loops, a folder holds no documents, a file is empty, too
            large or not UTF-8 text, a JSONL line has no usable text, or one id is given to two documents.
        InvalidOption: ``max_bytes`` is below 1.
    """
    if max_bytes < 1:
        raise InvalidOption(f"max_bytes is {max_bytes}; give a number of bytes from 1 up.")
    named = [paths] if isinstance(paths, str | Path) else list(paths)
    if not named:
        raise DocumentError("No document paths given. Name at least one file or folder.")
    found: list[_Found] = []
    seen: set[str] = set()
    for path in named:
        for file in _files(path):
            real = os.path.realpath(file)
            if real not in seen:
                seen.add(real)
                found.extend(_read_file(file, max_bytes))
    return _with_unique_ids(found)


# --- finding the files ------------------------------------------------------------------------------------------------


def _files(path: str | Path) -> list[Path]:
    """The files that ``path`` stands for: itself, or the documents below it."""
    text = os.fspath(path)
    if not text or "\0" in text:
        raise DocumentError("A document path is empty or contains a NUL character. Name a file or a folder.")
    path = Path(text)
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        raise _unusable(path, error) from error
    if stat.S_ISREG(mode):
        return [path]
    if not stat.S_ISDIR(mode):
        raise DocumentError(f"'{_show(path)}' is neither a file nor a folder. Save its content to a file and name that.")
    files = list(_walk(path))
    if not files:
        known = ", ".join(s for s in (*TEXT_SUFFIXES, JSONL_SUFFIX) if s)
        raise DocumentError(
            f"Folder '{_show(path)}' holds no documents. Put {known} files in it, or files without a suffix."
        )
    return files


def _walk(top: Path) -> Iterator[Path]:
    """Document files below ``top``, sorted by name in each folder. No recursion: depth is limited by the disk only."""
    visited: set[tuple[int, int]] = set()
    pending: list[tuple[Path, tuple[tuple[int, int], ...]]] = [(top, ())]
    while pending:
        path, above = pending.pop()
        try:
            status = os.stat(path)
        except OSError as error:
            # A link that points nowhere matters only where its name promises a document.
            if error.errno in (errno.ENOENT, errno.ELOOP) and not _is_document_name(path):
                continue
            raise _unusable(path, error) from error
        if stat.S_ISREG(status.st_mode) and _is_document_name(path):
            yield path
        elif stat.S_ISDIR(status.st_mode):
            here = (status.st_dev, status.st_ino)
            if here in above:
                raise DocumentError(f"'{_show(path)}' links back to a folder above it. Remove the link, or name the files.")
            if here in visited:
                continue
            visited.add(here)
            try:
                names = sorted(name for name in os.listdir(path) if not name.startswith("."))
            except OSError as error:
                raise _unusable(path, error) from error
            pending.extend((path / name, (*above, here)) for name in reversed(names))


def _is_document_name(path: Path) -> bool:
    return path.suffix.lower() in (*TEXT_SUFFIXES, JSONL_SUFFIX)


def _unusable(path: Path, error: OSError) -> DocumentError:
    """The message for a refusal of the operating system, with what to do about the ones that happen."""
    name = _show(path)
    if error.errno == errno.ELOOP:
        return DocumentError(
            f"'{name}' is a link that leads back to itself. Remove the link, or name the file it should reach."
        )
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        if os.path.islink(path):
            return DocumentError(f"'{name}' is a link to a file that does not exist. Repair or remove the link.")
        return DocumentError(f"'{name}' does not exist. Check the path; it is read relative to the current folder.")
    if error.errno in (errno.EACCES, errno.EPERM):
        return DocumentError(f"'{name}' may not be read by this user. Give yourself permission to read it.")
    return DocumentError(f"'{name}' can't be read: {error.strerror or error}. Check the path and the disk.")


# --- reading one file -------------------------------------------------------------------------------------------------


def _read_file(path: Path, max_bytes: int) -> list[_Found]:
    text = _decode(path, _read_bytes(path, max_bytes)).replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise DocumentError(f"'{_show(path)}' is empty. Leave it out, or put text in it.")
    if path.suffix.lower() == JSONL_SUFFIX:
        return list(_read_jsonl(path, text))
    return [_Found(DocumentFile(_printable(path.stem), None, text.strip(), path), id_is_given=False, line=None)]


def _read_bytes(path: Path, max_bytes: int) -> bytes:
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            # One byte more than allowed: a file that grows, or whose size the system doesn't tell, is noticed too.
            data = file.read(max_bytes + 1) if size <= max_bytes else b""
    except OSError as error:
        raise _unusable(path, error) from error
    size = max(size, len(data))
    if size > max_bytes:
        raise DocumentError(
            f"'{_show(path)}' has {size:,} bytes, the limit is {max_bytes:,}. Split it, or raise the limit (max_bytes)."
        )
    return data


def _decode(path: Path, data: bytes) -> str:
    """UTF-8, with or without a byte order mark; offsets in messages count from the start of the file."""
    if data.startswith(_UTF16_BOMS):
        raise DocumentError(f"'{_show(path)}' is UTF-16 text (byte order mark at byte 0). Save it as UTF-8.")
    nul = data.find(b"\0")
    if nul >= 0:
        raise DocumentError(
            f"'{_show(path)}' is not a text file (NUL at byte {nul:,}). Convert it to UTF-8 text, or leave it out."
        )
    start = len(_BOM) if data.startswith(_BOM) else 0
    try:
        return data[start:].decode("utf-8")
    except UnicodeDecodeError as error:
        offset = start + error.start
        what = f"0x{data[offset]:02x} at byte {offset:,}"
        raise DocumentError(f"'{_show(path)}' is not UTF-8 text ({what}). Save it as UTF-8, or leave it out.") from error


def _read_jsonl(path: Path, text: str) -> Iterator[_Found]:
    # split, not splitlines: JSON strings may hold U+2028 and its like unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _record(path, number, line)


def _record(path: Path, number: int, line: str) -> _Found:
    where = f"'{_show(path)}' line {number}"
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DocumentError(f"{where} is not JSON: {error.msg} (column {error.colno}). Write one object a line.") from error
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"{where} is not usable JSON: a number is too long or the nesting too deep.") from error
    if not isinstance(record, dict):
        raise DocumentError(f"{where} is not a JSON object. Write one object a line, with the document under 'text'.")
    key = _first_key(record, TEXT_KEYS)
    if key is None:
        keys = _printable(", ".join(map(repr, record))) or "none"
        raise DocumentError(
            f"{where} has no text; its keys are {keys}. Put the document under one of {', '.join(TEXT_KEYS)}."
        )
    body = _string(record[key], key, where).strip()
    if not body:
        raise DocumentError(f"{where}: '{key}' is empty. Remove the line, or put text in it.")
    title = record.get("title")
    title = None if title is None else " ".join(_string(title, "title", where).split()) or None
    id_key = _first_key(record, ID_KEYS)
    given = None if id_key is None else _given_id(record[id_key], id_key, where)
    document = DocumentFile(given or f"{_printable(path.stem)}:{number}", title, body, path)
    return _Found(document, id_is_given=given is not None, line=number)


def _first_key(record: Mapping[str, object], keys: Sequence[str]) -> str | None:
    return next((key for key in keys if record.get(key) is not None), None)


def _string(value: object, key: str, where: str) -> str:
    if not isinstance(value, str):
        raise DocumentError(f"{where}: '{key}' is a {type(value).__name__}, not a string. Write it in quotes.")
    if any("\ud800" <= char <= "\udfff" for char in value):
        # No tokenizer takes half of a surrogate pair; found here, the message can still name the line.
        raise DocumentError(f"{where}: '{key}' holds half of a surrogate pair (\\ud800 to \\udfff). Write whole characters.")
    return value.replace("\r\n", "\n").replace("\r", "\n")


def _given_id(value: object, key: str, where: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    text = _string(value, key, where).strip()
    if not text:
        raise DocumentError(f"{where}: '{key}' is empty. Give the document an id, or leave the key out.")
    return text


# --- ids and names ----------------------------------------------------------------------------------------------------


def _with_unique_ids(found: Sequence[_Found]) -> list[DocumentFile]:
    """Ids made from file names give way to the path where they clash; ids that a record gives never change."""
    count = Counter(item.document.id for item in found)
    places: dict[str, str] = {}
    documents = []
    for item in found:
        document = item.document
        if count[document.id] > 1 and not item.id_is_given:
            document = replace(document, id=item.place)
        if document.id in places:
            both = f"{places[document.id]} and {item.place}"
            raise DocumentError(f"Two documents have the id '{_printable(document.id)}': {both}. Change one of the ids.")
        places[document.id] = item.place
        documents.append(document)
    return documents


def _show(path: Path) -> str:
    return _printable(os.fspath(path))


def _printable(text: str) -> str:
    """``text`` as one line that any terminal and log can print; file names may hold anything."""
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace") if not text.isascii() else text
    return "".join(char if char.isprintable() else "\ufffd" for char in text)
