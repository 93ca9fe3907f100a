"""Administration of a store folder: what it says agrees with what was stored, and nothing it is given can break it."""

from __future__ import annotations

import io
import json
import os
import random
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from kvweave.core.keys import ChunkIdentity, ModelFingerprint, Scope
from kvweave.core.spec import KVLayout, LayerSpec
from kvweave.errors import InvalidOption, StoreError
from kvweave.store import erasure, folder, selection
from kvweave.store.admin import StoreFolder
from kvweave.store.archive import MANIFEST, describe, export_records, export_tensors, import_records, private_output
from kvweave.store.base import ChunkRecord, Miss
from kvweave.store.disk import DiskBlobs
from kvweave.store.host import HostStore
from kvweave.store.selection import Selection, parse_age, parse_key, tag_of
from kvweave.store.tiered import TieredStore

LAYOUT = KVLayout((LayerSpec(4, 2, 16, 8), LayerSpec(4, 1, 8, 8)), torch.bfloat16)
MODELS = [ModelFingerprint.of(content=name) for name in ("one", "two")]
TENANTS = ("ada", "bob")
TOKENS = 70
SECRET = b"0123456789abcdef"


@pytest.fixture(autouse=True)
def _quick_receipts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(erasure, "EPOCH_TTL", 0.0)


class Backwards:
    """So that stored rows aren't in the order of the text."""

    name = "test/1"

    def order(self, record: ChunkRecord) -> np.ndarray:
        return np.arange(len(record.identity.token_ids))[::-1]


def record(number: int, scope: Scope, model: ModelFingerprint = MODELS[0]) -> ChunkRecord:
    generator = torch.Generator().manual_seed(number)
    identity = ChunkIdentity.of([*range(TOKENS - 1), number], [1, 2], model, scope)
    shapes = [((s.num_kv_heads, TOKENS, s.key_dim), (s.num_kv_heads, TOKENS, s.value_dim)) for s in LAYOUT.layers]
    keys, values = (tuple(torch.randn(shape[i], generator=generator).bfloat16() for shape in shapes) for i in (0, 1))
    return ChunkRecord(identity, keys, values, 5.0)


def engine(root: Path, capacity: int | None = 2**30) -> TieredStore:
    return TieredStore(HostStore(0), [DiskBlobs(root, capacity)], layout=LAYOUT, ranking=Backwards())


def fill(root: Path, numbers: range = range(4)) -> list[ChunkRecord]:
    """For each tenant and model ``numbers`` records."""
    store = engine(root)
    put = [record(n, store.scope(tenant), model) for tenant in TENANTS for model in MODELS for n in numbers]
    for one in put:
        assert store.put(one, wait=True)
    assert store.flush(30)
    store.close()
    return put


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def stored(root: Path) -> list[ChunkRecord]:
    return fill(root)


@pytest.fixture
def admin(root: Path, stored: list[ChunkRecord]) -> Iterator[StoreFolder]:
    with StoreFolder(root) as opened:
        yield opened


def found_by_an_engine(root: Path, records: list[ChunkRecord]) -> list[bool]:
    store = engine(root)
    try:
        wanted = [record(r.identity.token_ids[-1], store.scope(_tenant(r)), r.identity.fingerprint) for r in records]
        answers = store.find([w.identity for w in wanted])
        for answer in answers:
            if not isinstance(answer, Miss):
                answer.close()
        return [not isinstance(answer, Miss) for answer in answers]
    finally:
        store.close()


def _tenant(one: ChunkRecord) -> str:
    return next(t for t in TENANTS if Scope.of(t).tag == one.key.scope)


def damage(path: str, at: int = -5) -> None:
    """Flip a bit; from the end it is one of the last layer's rows or padding, so choose with care."""
    data = bytearray(Path(path).read_bytes())
    data[at] ^= 1
    Path(path).write_bytes(data)


# --- which records --------------------------------------------------------------------------------------------------------


def test_the_marker_is_the_disk_tiers() -> None:
    assert selection.MARKER == folder._MARKER


def test_selections(admin: StoreFolder, stored: list[ChunkRecord]) -> None:
    def keys(**conditions: object) -> set[str]:
        return {info.key.name for info in admin.select(Selection(**conditions))}  # type: ignore[arg-type]

    def of(test: Callable[[ChunkRecord], bool]) -> set[str]:
        return {one.key.name for one in stored if test(one)}

    assert keys() == of(lambda r: True)
    assert len(keys()) == 16
    assert keys(scope=tag_of("ada")) == of(lambda r: r.key.scope == Scope.of("ada").tag)
    assert keys(scope=tag_of("ada")[:5]) == keys(scope=tag_of("ada"))
    assert keys(model=MODELS[1].short) == of(lambda r: r.identity.fingerprint == MODELS[1])
    assert keys(model=MODELS[1].digest.hex()) == keys(model=MODELS[1].short)
    assert keys(scope=tag_of("bob"), model=MODELS[0].short) == of(
        lambda r: r.key.scope == Scope.of("bob").tag and r.identity.fingerprint == MODELS[0]
    )
    assert keys(older_than=3600.0) == keys(unused_for=3600.0) == keys(pinned=True) == set()
    assert keys(older_than=0.0) == keys(pinned=False) == keys()
    some = stored[3].key
    assert keys(keys=(some.name,)) == keys(keys=(some.content.hex()[:12],)) == {some.name}
    assert keys(prefix=some.content.hex()[:1]) == of(lambda r: r.key.content.hex()[0] == some.content.hex()[0])
    assert Selection().everything
    assert not Selection(model="a").everything


def test_order_of_a_listing(admin: StoreFolder) -> None:
    for sort, value in (("size", "size"), ("created", "created"), ("used", "last_used"), ("hits", "hits")):
        values = [getattr(info, value) for info in admin.select(Selection(), sort)]
        assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("conditions", [{"keys": ("xyz",)}, {"keys": ("",)}, {"prefix": "../.."}, {"scope": "a" * 17}])
def test_what_cannot_be_a_key(conditions: dict[str, object]) -> None:
    with pytest.raises(InvalidOption, match="digits"):
        Selection(**conditions)  # type: ignore[arg-type]


def test_unknown_and_ambiguous_keys(admin: StoreFolder, stored: list[ChunkRecord]) -> None:
    with pytest.raises(StoreError, match="no record"):
        admin.select(Selection(keys=("0" * 32,)))
    digits = [one.key.content.hex()[0] for one in stored]
    twice = next(d for d in digits if digits.count(d) > 1)
    with pytest.raises(InvalidOption, match="ambiguous"):
        admin.select(Selection(keys=(twice,)))


def test_ages_and_names() -> None:
    assert [parse_age(t) for t in ("90s", "1.5m", "2h", "1d", "1w")] == [90, 90, 7200, 86400, 604800]
    for text in ("", "7", "d", "-1d", "7 days", "1e9d", "inf", "9" * 30 + "d"):
        with pytest.raises(InvalidOption, match="span"):
            parse_age(text)
    name = f"{'a' * 16}/{'b' * 16}/cc/{'c' * 32}"
    assert parse_key(name) is not None
    for wrong in ("", name.upper(), name + "\n", f"/{name}", f"../{name}", name.replace("/cc/", "/dd/"), name[:-1]):
        assert parse_key(wrong) is None


# --- folders that aren't stores -------------------------------------------------------------------------------------------


def test_what_is_not_a_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, words in (("nowhere", "doesn't exist"), ("file", "is a file"), ("empty", "isn't a store")):
        with pytest.raises(InvalidOption, match=words):
            StoreFolder(tmp_path / name)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "file"]
    assert not list((tmp_path / "empty").iterdir())


def test_a_folder_of_another_format(root: Path, stored: list[ChunkRecord]) -> None:
    (root / selection.MARKER).write_text('{"format": 2}')
    with pytest.raises(InvalidOption, match="format"):
        StoreFolder(root)


# --- looking --------------------------------------------------------------------------------------------------------------


def test_statistics(admin: StoreFolder, root: Path, stored: list[ChunkRecord]) -> None:
    size = sum(Path(admin.path(one.key)).stat().st_size for one in stored)
    admin.pin(admin.select(Selection(keys=(stored[0].key.name,))), 60.0, "test")
    (root / "v1" / stored[0].key.name).parent.joinpath(".tmp-somebody").write_text("x")
    stats = admin.stats()
    assert (stats.records, stats.bytes, stats.tokens) == (16, size, 16 * TOKENS)
    assert stats.counted_bytes == size
    assert stats.capacity == 2**30
    assert stats.free > 0
    assert (stats.pinned_records, stats.pinned_bytes) == (1, size // 16)
    assert (stats.unreadable, stats.temporary_files, stats.damaged_files, stats.processes) == (0, 1, 0, 0)
    assert set(stats.scopes) == {tag_of(t) for t in TENANTS}
    assert set(stats.models) == {m.digest[:8].hex() for m in MODELS}
    assert all((s.records, s.tokens) == (8, 8 * TOKENS) for s in (*stats.scopes.values(), *stats.models.values()))
    other = engine(root)
    assert admin.stats().processes == 1
    other.close()
    damage(admin.path(stored[5].key), 70)
    assert admin.stats().unreadable == 1


def test_looking_is_not_a_use(admin: StoreFolder) -> None:
    before = admin.select(Selection())
    admin.verify(before, full=True)
    admin.stats()
    for info in before:
        admin.check(info, full=True)
    admin.blobs.flush()
    assert admin.select(Selection()) == before


def test_a_header_says_what_was_stored(admin: StoreFolder, stored: list[ChunkRecord]) -> None:
    (info,) = admin.select(Selection(keys=(stored[2].key.name,)))
    found = admin.check(info, full=True)
    assert found is not None
    assert found.header is not None
    assert found.header.identity == stored[2].identity
    assert found.header.prefill_ms == 5.0
    assert abs(found.header.created - time.time()) < 60


def test_verify_finds_every_flipped_byte_of_the_rows_and_the_header(admin: StoreFolder, stored: list[ChunkRecord]) -> None:
    (info,) = admin.select(Selection(keys=(stored[0].key.name,)))
    whole = admin.check(info)
    assert whole is not None
    assert whole.header is not None
    header, path = whole.header, admin.path(info.key)
    good = Path(path).read_bytes()
    rng = random.Random(1)
    rows = [header.offsets[layer] + rng.randrange(TOKENS * header.row_bytes(layer)) for layer in range(2) for _ in range(15)]
    for at, full in [*((at, True) for at in rows), *((rng.randrange(600), False) for _ in range(30))]:
        damage(path, at)
        result = admin.verify([info], full=full)
        assert len(result.damaged) == result.checked == 1, at
        Path(path).write_bytes(good)
    assert not admin.verify([info], full=True).damaged


def test_verify_and_repair(admin: StoreFolder, root: Path, stored: list[ChunkRecord]) -> None:
    infos = admin.select(Selection())
    size = sum(info.size for info in infos)
    clean = admin.verify(infos, full=True)
    assert (clean.checked, clean.bytes, clean.gone, clean.damaged, clean.repaired) == (16, size, 0, (), 0)
    paths = [admin.path(one.key) for one in stored]
    os.truncate(paths[0], 100)
    os.truncate(paths[1], 0)
    Path(paths[2]).write_bytes(os.urandom(4096))
    damage(paths[3], Path(paths[3]).stat().st_size // 2)
    os.unlink(paths[4])
    Path(paths[5]).write_bytes(Path(paths[6]).read_bytes())
    os.unlink(paths[7])
    os.symlink(paths[6], paths[7])
    os.unlink(paths[8])
    os.mkfifo(paths[8])
    steps: list[str] = []
    result = admin.verify(infos, full=True, step=steps.append)
    reasons = {d.key: d.reason for d in result.damaged}
    assert (result.checked, result.gone, len(steps)) == (15, 1, 16)
    assert [reasons[one.key] for one in stored[:3]] == ["short", "short", "layout"]
    assert reasons[stored[5].key] == "key"
    assert reasons[stored[7].key] == reasons[stored[8].key] == "io"
    assert len(reasons) in (6, 7), "the byte in the middle may be padding"
    repaired = admin.verify(infos, full=True, repair=True)
    assert repaired.repaired == len(reasons) - 2, "what can't be read isn't damaged"
    assert len(list((root / "v1" / "damaged").iterdir())) == repaired.repaired
    left = admin.verify(admin.select(Selection()), full=True)
    assert {d.reason for d in left.damaged} == {"io"}


# --- changing -------------------------------------------------------------------------------------------------------------


def test_pins(admin: StoreFolder, stored: list[ChunkRecord]) -> None:
    some = admin.select(Selection(scope=tag_of("ada")))
    assert admin.pin(some, 60.0, "test") == 8
    assert {i.key for i in admin.select(Selection(pinned=True))} == {i.key for i in some}
    until = admin.select(Selection(pinned=True))[0].pinned_until
    assert abs(until - time.time() - 60.0) < 10
    assert admin.unpin(admin.select(Selection())) == 8
    assert admin.unpin(admin.select(Selection())) == 0
    with pytest.raises(InvalidOption, match="expiry"):
        admin.pin(some, -1.0, "test")


def test_removed_records_are_gone_for_a_running_engine(admin: StoreFolder, root: Path, stored: list[ChunkRecord]) -> None:
    store = engine(root)
    try:
        wanted = [one.identity for one in stored]
        doomed = admin.select(Selection(model=MODELS[0].short))
        assert admin.remove(doomed) == 8
        assert admin.remove(doomed) == 0
        answers = store.find(wanted)
        gone = {info.key for info in doomed}
        assert all(isinstance(a, Miss) == (w.key in gone) for a, w in zip(answers, wanted, strict=True))
        for answer in answers:
            if not isinstance(answer, Miss):
                answer.close()
        assert store.put(stored[0], wait=True)
        assert store.flush(10)
        assert len(admin.select(Selection())) == 9
    finally:
        store.close()


def test_erasure(admin: StoreFolder, root: Path, stored: list[ChunkRecord]) -> None:
    receipt = admin.erase("ada")
    assert (receipt.scope, receipt.pending) == (tag_of("ada"), ())
    assert set(receipt.tiers) == {"disk"}
    assert receipt.tiers["disk"].records == 8
    assert receipt.tiers["disk"].bytes > 0
    assert len(receipt.digest) == 64
    assert {i.key.scope.hex() for i in admin.select(Selection())} == {tag_of("bob")}
    assert not list(root.glob(f"v1/*/{tag_of('ada')}/*"))
    assert found_by_an_engine(root, stored) == [r.key.scope != Scope.of("ada").tag for r in stored]
    assert admin.epoch(Scope.of("ada").tag) == receipt.epoch > 0
    assert admin.erase("ada").epoch > receipt.epoch
    assert tag_of("bob", SECRET) != tag_of("bob")
    assert admin.erase("bob", SECRET).tiers["disk"].records == 0
    assert len(admin.select(Selection())) == 8


def test_a_read_only_folder(root: Path, stored: list[ChunkRecord], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kvweave.store.disk.prepare_root", lambda root: False)
    damaged = next(iter(root.glob("v1/*/*/*/*.kvr")))
    damage(str(damaged), 70)
    with StoreFolder(root) as admin:
        infos = admin.select(Selection())
        stats = admin.stats()
        assert (stats.records, stats.read_only, stats.unreadable) == (16, True, 1)
        assert admin.verify(infos, full=True, repair=True).repaired == 0
        assert export_records(admin, infos, tmp_path / "out.tar").records == 15
        for change in (
            lambda: admin.pin(infos, 60.0, "test"),
            lambda: admin.unpin(infos),
            lambda: admin.remove(infos),
            lambda: admin.erase("ada"),
        ):
            with pytest.raises(StoreError, match="read-only"):
                change()
    assert damaged.exists()


def test_a_locked_catalogue_is_told(admin: StoreFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvweave.store.base import TierError

    def busy(*args: object) -> None:
        raise TierError("busy", "locked")

    infos = admin.select(Selection())
    monkeypatch.setattr(admin.blobs, "pin", busy)
    with pytest.raises(StoreError, match="Try again"):
        admin.pin(infos, 60.0, "test")


# --- archives -------------------------------------------------------------------------------------------------------------


def files(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.glob("v1/*/*/*/*.kvr")}


def test_there_and_back(admin: StoreFolder, root: Path, stored: list[ChunkRecord], tmp_path: Path) -> None:
    out = tmp_path / "all.tar"
    os.umask(0)
    try:
        done = export_records(admin, admin.select(Selection()), out)
    finally:
        os.umask(0o022)
    assert (done.records, done.skipped) == (16, {})
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert [p for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    with tarfile.open(out) as tar:
        names = tar.getnames()
    assert names[0] == MANIFEST
    assert set(names[1:]) == {f"{one.key.name}.kvr" for one in stored}
    with StoreFolder(tmp_path / "new", create=True) as new:
        added = import_records(new, out)
        assert (added.added, added.present, added.skipped, added.bytes) == (16, 0, {}, done.bytes)
        assert import_records(new, out).present == 16
        stats = new.stats()
    assert (stats.records, stats.tokens) == (16, 16 * TOKENS)
    assert files(tmp_path / "new") == files(root)
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in (tmp_path / "new").glob("v1/*/*/*/*.kvr"))
    assert all(found_by_an_engine(tmp_path / "new", stored))


def test_an_export_leaves_out_what_is_damaged_or_gone(admin: StoreFolder, stored: list[ChunkRecord], tmp_path: Path) -> None:
    infos = admin.select(Selection())
    damage(admin.path(stored[0].key), 70)
    os.unlink(admin.path(stored[1].key))
    done = export_records(admin, infos, tmp_path / "out.tar")
    assert done.records == 14
    assert done.skipped == {"checksum": 1, "gone": 1}


def test_targets_that_cannot_be_written(admin: StoreFolder, tmp_path: Path) -> None:
    infos, out = admin.select(Selection())[:1], tmp_path / "out.tar"
    out.write_text("mine")
    with pytest.raises(StoreError, match="exists already"):
        export_records(admin, infos, out)
    assert out.read_text() == "mine"
    assert export_records(admin, infos, out, force=True).records == 1
    for target in (tmp_path / "no" / "such" / "folder.tar", tmp_path, out / "below"):
        with pytest.raises(StoreError, match=r"can't be written|exists already"):
            export_records(admin, infos, target, force=True)
        with pytest.raises(StoreError, match=r"can't be written|exists already"):
            export_tensors(admin, infos[0], target, force=True)


def test_an_interrupted_export_leaves_nothing(tmp_path: Path) -> None:
    def write_half() -> None:
        with private_output(tmp_path / "out", force=False) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert not list(tmp_path.iterdir())


def test_an_archive_from_before_an_erasure(admin: StoreFolder, stored: list[ChunkRecord], tmp_path: Path) -> None:
    old, new = tmp_path / "old.tar", tmp_path / "new.tar"
    export_records(admin, admin.select(Selection(scope=tag_of("ada"))), old)
    admin.erase("ada")
    assert import_records(admin, old).skipped == {"erased": 8}
    store = engine(admin.root)
    assert store.put(record(9, store.scope("ada")), wait=True)
    store.close()
    export_records(admin, admin.select(Selection(scope=tag_of("ada"))), new)
    with StoreFolder(tmp_path / "other", create=True) as other:
        assert import_records(other, new).skipped == {"epoch": 1}, "nobody there would ever find it"
        assert import_records(other, old).added == 8


def test_an_import_keeps_within_the_capacity(admin: StoreFolder, stored: list[ChunkRecord], tmp_path: Path) -> None:
    export_records(admin, admin.select(Selection()), tmp_path / "all.tar")
    size = Path(admin.path(stored[0].key)).stat().st_size
    small = engine(tmp_path / "small", capacity=5 * size)
    small.tiers[0].blobs.reconciled.wait(10)  # type: ignore[attr-defined]
    small.close()
    with StoreFolder(tmp_path / "small") as target:
        done = import_records(target, tmp_path / "all.tar")
        assert (done.added, done.skipped) == (5, {"no_room": 11})
        assert target.stats().counted_bytes == 5 * size


# --- hostile archives -----------------------------------------------------------------------------------------------------


def member(name: str, data: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def archive(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    return path


def everything_below(top: Path) -> set[str]:
    return {str(p) for p in top.rglob("*")}


def test_nothing_is_written_outside(admin: StoreFolder, stored: list[ChunkRecord], tmp_path: Path) -> None:
    good = Path(admin.path(stored[0].key)).read_bytes()
    name, other = f"{stored[0].key.name}.kvr", f"{stored[1].key.name}.kvr"
    bad = archive(
        tmp_path / "bad.tar",
        member(f"../{name}", good),
        member(f"/{name}", good),
        member(f"{name}/../../../../../x.kvr", good),
        member("x.kvr", good),
        member("README", b"hello"),
        member(name, type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        member(name, type=tarfile.LNKTYPE, linkname=other),
        member(name, type=tarfile.DIRTYPE),
        member(name, type=tarfile.FIFOTYPE),
        member(name, type=tarfile.CHRTYPE),
        member(other, good),
        member(name, good[:-1]),
        member(name, b""),
        member(name, os.urandom(5000)),
        member(f"v1/{name}", good),
    )
    (tmp_path / "target").mkdir()
    with StoreFolder(tmp_path / "target" / "store", create=True) as target:
        before = everything_below(tmp_path)
        done = import_records(target, bad)
        assert done.added == 1
        assert done.skipped == {"alien": 5, "link": 5, "key": 1, "short": 2, "layout": 1}
        assert len(done.named) == 14
        new = everything_below(tmp_path) - before
        record_path = target.path(stored[0].key)
        assert all(path in record_path or "/owners/" in path or "catalog" in path for path in new), new
    assert stat.S_IMODE(os.stat(record_path).st_mode) == 0o600


def test_sparse_and_huge_members(admin: StoreFolder, stored: list[ChunkRecord], tmp_path: Path) -> None:
    name = f"{stored[0].key.name}.kvr"
    huge = tmp_path / "huge.tar"
    info = tarfile.TarInfo(name)
    info.size = 2**62
    huge.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(10240))
    with StoreFolder(tmp_path / "new", create=True) as target:
        with pytest.raises(StoreError, match="not a whole archive"):
            import_records(target, huge)
        sparse = tmp_path / "sparse.tar"
        with open(tmp_path / "holes", "wb") as file:
            file.truncate(2**33)
        subprocess.run(
            ["tar", "--sparse", f"--transform=s|holes|{name}|", "-cf", str(sparse), "-C", str(tmp_path), "holes"], check=True
        )
        start = time.monotonic()
        assert import_records(target, sparse).skipped == {"link": 1}
        assert time.monotonic() - start < 5


def test_truncated_and_scrambled_archives(admin: StoreFolder, tmp_path: Path) -> None:
    """An error or whole records; never anything else, and never silence about what is missing."""
    whole = tmp_path / "whole.tar"
    export_records(admin, admin.select(Selection())[:3], whole)
    data = whole.read_bytes()
    end = len(data.rstrip(b"\0"))
    rng = random.Random(2)
    cuts = [0, 1, 511, 512, 513, 2000, end - 5000, end - 1, *(rng.randrange(end) for _ in range(10))]
    for number, cut in enumerate(cuts):
        broken = tmp_path / "cut.tar"
        broken.write_bytes(data[:cut])
        with StoreFolder(tmp_path / f"cut-{number}", create=True) as target:
            with pytest.raises(StoreError, match="not a whole archive"):
                import_records(target, broken)
            infos = target.select(Selection())
            assert len(infos) < 3 or cut >= end - 4096
            assert not target.verify(infos, full=True).damaged
    with StoreFolder(tmp_path / "scrambled", create=True) as target:
        for _ in range(60):
            broken = bytearray(data)
            for _ in range(rng.choice([1, 3, 50])):
                broken[rng.randrange(end)] = rng.randrange(256)
            (tmp_path / "x.tar").write_bytes(broken)
            try:
                done = import_records(target, tmp_path / "x.tar")
            except StoreError:
                continue
            assert done.added + done.present + sum(done.skipped.values()) == 3
        assert not target.verify(target.select(Selection()), full=True).damaged


@pytest.mark.parametrize("content", [b"", b"not a tar", os.urandom(4096), b"\x1f\x8b" + b"x" * 1000])
def test_no_archive_at_all(admin: StoreFolder, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.tar").write_bytes(content)
    with pytest.raises(StoreError, match="not a whole archive"):
        import_records(admin, tmp_path / "x.tar")
    for path in (tmp_path / "nowhere.tar", tmp_path):
        with pytest.raises(StoreError, match="can't be read"):
            import_records(admin, path)


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"format": 2}', b'{"format": 1}', b'{"format": 1, "epochs": {"a": "x"}}'])
def test_a_manifest_that_makes_no_sense(admin: StoreFolder, tmp_path: Path, text: bytes) -> None:
    with pytest.raises(StoreError, match="not a whole archive"):
        import_records(admin, archive(tmp_path / "x.tar", member(MANIFEST, text)))


def test_an_archive_made_by_hand(admin: StoreFolder, root: Path, tmp_path: Path) -> None:
    subprocess.run(["tar", "-cf", tmp_path / "hand.tar", "-C", root, "--exclude=*/owners/*", "v1"], check=True)
    with StoreFolder(tmp_path / "new", create=True) as target:
        done = import_records(target, tmp_path / "hand.tar")
    assert done.added == 16
    assert set(done.skipped) == {"alien", "link"}, "the catalogue and the folders"


# --- safetensors ----------------------------------------------------------------------------------------------------------


def test_tensors_of_one_record(admin: StoreFolder, stored: list[ChunkRecord], tmp_path: Path) -> None:
    one, out = stored[2], tmp_path / "one.safetensors"
    (info,) = admin.select(Selection(keys=(one.key.name,)))
    header = export_tensors(admin, info, out)
    assert header.order == "test/1", "not the order of the text"
    tensors = load_file(out)
    assert tensors.pop("token_ids").tolist() == list(one.identity.token_ids)
    assert tensors.pop("anchor_ids").tolist() == [1, 2]
    assert len(tensors) == 4
    for layer in range(2):
        assert torch.equal(tensors[f"layers.{layer}.keys"], one.keys[layer])
        assert torch.equal(tensors[f"layers.{layer}.values"], one.values[layer])
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    damage(admin.path(one.key), header.offsets[1])
    with pytest.raises(StoreError, match="damaged"):
        export_tensors(admin, info, tmp_path / "two.safetensors")
    os.unlink(admin.path(one.key))
    with pytest.raises(StoreError, match="gone"):
        export_tensors(admin, info, tmp_path / "two.safetensors")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.safetensors", "store"]


def test_selection_loads_no_torch() -> None:
    code = "import sys, kvweave.store.selection; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_manifest_is_small_json(admin: StoreFolder, tmp_path: Path) -> None:
    export_records(admin, admin.select(Selection())[:1], tmp_path / "x.tar")
    with tarfile.open(tmp_path / "x.tar") as tar:
        source = tar.extractfile(MANIFEST)
        assert source is not None
        about = json.load(source)
    assert about["format"] == 1
    assert list(about["epochs"].values()) == [0]


def test_an_expiry_travels_and_what_is_over_stays_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, now = tmp_path / "store", time.time()
    store = engine(root)
    for number, expires in ((1, now + 1000), (2, now + 5000), (3, None)):
        store.put(record(number, store.scope("ada"), MODELS[0]), wait=True, expires=expires)
    store.close()
    with StoreFolder(root) as admin:
        infos = admin.select(Selection())
        ends = sorted(describe(found.header)["expires"] or 0 for i in infos if (found := admin.check(i)) and found.header)
        assert ends == [0, int(now + 1000), int(now + 5000)]
        export_records(admin, infos, tmp_path / "out.tar")
    monkeypatch.setattr(time, "time", lambda: now + 2000)
    with StoreFolder(tmp_path / "copy", create=True) as copy:
        done = import_records(copy, tmp_path / "out.tar")
        assert (done.added, done.skipped) == (2, {"expired": 1})
