"""``kvweave cache``: its commands and their options. Bodies import what they need."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvweave.cli.environment import disk_tier_from_environment
from kvweave.cli.options import Json, LogLevel, read_secret
from kvweave.config import Tiers
from kvweave.errors import InvalidOption

if TYPE_CHECKING:
    from kvweave.store.selection import Selection

cache = typer.Typer(
    rich_markup_mode="rich",
    help="Look at the folder of a disk tier, and keep order in it. Engines may use the folder meanwhile.",
    epilog="Exit codes: 0 fine, 1 failed, 2 usage, 3 verify or inspect found damage.",
)
WHICH = "Which records"

Store = Annotated[
    str | None,
    typer.Option("--store", metavar="DIR", help="The folder. Default: that of KVWEAVE_DISK_TIER.", show_default=False),
]
Keys = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY]...", help="Keys, or their first digits.", show_default=False)
]
Key = Annotated[str, typer.Argument(metavar="KEY", help="A key, or its first digits.", show_default=False)]
Prefix = Annotated[str | None, typer.Option(help="Keys that start with these digits.", rich_help_panel=WHICH)]
Scope = Annotated[str | None, typer.Option(help="Of the tenant with this tag.", rich_help_panel=WHICH)]
Tenant = Annotated[str | None, typer.Option(help="Of the tenant of this name.", rich_help_panel=WHICH)]
SecretFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="What keys the tenants' names, if engines have it.", rich_help_panel=WHICH),
]
Model = Annotated[str | None, typer.Option(help="Of the model with this fingerprint.", rich_help_panel=WHICH)]
OlderThan = Annotated[str | None, typer.Option(metavar="SPAN", help="Stored so long ago: 12h, 7d.", rich_help_panel=WHICH)]
UnusedFor = Annotated[str | None, typer.Option(metavar="SPAN", help="Last used so long ago.", rich_help_panel=WHICH)]
Pinned = Annotated[
    bool | None, typer.Option("--pinned/--unpinned", help="Only pinned ones, or only others.", rich_help_panel=WHICH)
]
Force = Annotated[bool, typer.Option("--force", help="Replace a file of that name.")]


@cache.callback(invoke_without_command=True)
def start(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@cache.command("ls")
def list_records(
    keys: Keys = None,
    store: Store = None,
    prefix: Prefix = None,
    scope: Scope = None,
    tenant: Tenant = None,
    secret_file: SecretFile = None,
    model: Model = None,
    older_than: OlderThan = None,
    unused_for: UnusedFor = None,
    pinned: Pinned = None,
    sort: Annotated[
        Literal["used", "created", "size", "hits"], typer.Option(help="Latest, largest, most used first.")
    ] = "used",
    limit: Annotated[int, typer.Option(min=0, help="Show so many at most; 0: all.")] = 50,
    json: Json = False,
    log_level: LogLevel = "warning",
) -> None:
    """Records with their sizes, ages, uses and pins."""
    selection = _select(keys, prefix, scope, tenant, secret_file, model, older_than, unused_for, pinned)
    folder = _folder(store)
    from kvweave.cli.cache_show import show_records

    show_records(folder, selection, sort=sort, limit=limit, as_json=json)


@cache.command()
def stats(store: Store = None, json: Json = False, log_level: LogLevel = "warning") -> None:
    """What the folder holds, by tenant and by model, and its state. Reads every header."""
    folder = _folder(store)
    from kvweave.cli.cache_show import show_stats

    show_stats(folder, as_json=json)


@cache.command()
def inspect(
    key: Key,
    store: Store = None,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="OUT.safetensors", help="Write K and V of every layer there: keys unrotated, in the order of the text."
        ),
    ] = None,
    force: Force = False,
    json: Json = False,
    log_level: LogLevel = "warning",
) -> int:
    """One record: what its header says, and whether all its bytes are right."""
    selection, folder = _select([key]), _folder(store)
    from kvweave.cli.cache_show import show_record

    return show_record(folder, selection, export=export, force=force, as_json=json)


@cache.command()
def verify(
    keys: Keys = None,
    store: Store = None,
    headers: Annotated[bool, typer.Option("--headers", help="Check headers alone, not all bytes.")] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Take damaged records away; the last 16 are kept aside as damaged/*.bad.")
    ] = False,
    prefix: Prefix = None,
    scope: Scope = None,
    tenant: Tenant = None,
    secret_file: SecretFile = None,
    model: Model = None,
    older_than: OlderThan = None,
    unused_for: UnusedFor = None,
    json: Json = False,
    log_level: LogLevel = "warning",
) -> int:
    """Check records against their digests. Exit code 3: some are damaged, whether they were repaired or not."""
    selection = _select(keys, prefix, scope, tenant, secret_file, model, older_than, unused_for)
    folder = _folder(store)
    from kvweave.cli.cache_change import verify_records

    return verify_records(folder, selection, full=not headers, repair=repair, as_json=json)


@cache.command()
def pin(
    span: Annotated[str, typer.Option("--for", metavar="SPAN", help="How long: 12h, 7d.", show_default=False)],
    keys: Keys = None,
    store: Store = None,
    prefix: Prefix = None,
    scope: Scope = None,
    tenant: Tenant = None,
    secret_file: SecretFile = None,
    model: Model = None,
    owner: Annotated[str, typer.Option(help="Noted with the pin.")] = "command line",
    json: Json = False,
    log_level: LogLevel = "warning",
) -> int:
    """Keep records from eviction for a while. At most half of the capacity can be pinned."""
    selection = _named(_select(keys, prefix, scope, tenant, secret_file, model))
    folder = _folder(store)
    from kvweave.cli.cache_change import pin_records

    return pin_records(folder, selection, span=span, owner=owner, as_json=json)


@cache.command()
def unpin(
    keys: Keys = None,
    store: Store = None,
    prefix: Prefix = None,
    scope: Scope = None,
    tenant: Tenant = None,
    secret_file: SecretFile = None,
    model: Model = None,
    everything: Annotated[bool, typer.Option("--all", help="Every record.")] = False,
    json: Json = False,
    log_level: LogLevel = "warning",
) -> int:
    """Let records be evicted again."""
    selection = _named(_select(keys, prefix, scope, tenant, secret_file, model), everything)
    folder = _folder(store)
    from kvweave.cli.cache_change import unpin_records

    return unpin_records(folder, selection, as_json=json)


@cache.command("rm")
def remove(
    keys: Keys = None,
    store: Store = None,
    prefix: Prefix = None,
    scope: Scope = None,
    tenant: Tenant = None,
    secret_file: SecretFile = None,
    model: Model = None,
    older_than: OlderThan = None,
    unused_for: UnusedFor = None,
    everything: Annotated[bool, typer.Option("--all", help="Every record.")] = False,
    pinned: Annotated[bool, typer.Option("--pinned", help="Pinned ones too.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it; without this, it only says what would go.")] = False,
    json: Json = False,
    log_level: LogLevel = "warning",
) -> int:
    """Remove records; they may be computed again. To forget a tenant for good, use erase."""
    selection = _select(keys, prefix, scope, tenant, secret_file, model, older_than, unused_for)
    _named(selection, everything)
    folder = _folder(store)
    from kvweave.cli.cache_change import remove_records

    return remove_records(folder, selection, pinned=pinned, yes=yes, as_json=json)


@cache.command()
def erase(
    tenant: Annotated[str, typer.Argument(help="The tenant's name.", show_default=False)],
    store: Store = None,
    secret_file: SecretFile = None,
    force: Annotated[bool, typer.Option("--force", help="Even if nothing of this tenant was ever here.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it; without this, it only says what would go.")] = False,
    json: Json = False,
    log_level: LogLevel = "warning",
) -> int:
    """Make all KV of a tenant unreachable for every process on the folder, remove it, and print a receipt."""
    secret, folder = read_secret(secret_file), _folder(store)
    from kvweave.cli.cache_change import erase_tenant

    return erase_tenant(folder, tenant, secret, force=force, yes=yes, as_json=json)


@cache.command("export")
def export_(
    archive: Annotated[Path, typer.Argument(metavar="OUT.tar", help="The file to write.", show_default=False)],
    keys: Keys = None,
    store: Store = None,
    prefix: Prefix = None,
    scope: Scope = None,
    tenant: Tenant = None,
    secret_file: SecretFile = None,
    model: Model = None,
    older_than: OlderThan = None,
    unused_for: UnusedFor = None,
    force: Force = False,
    json: Json = False,
    log_level: LogLevel = "warning",
) -> int:
    """Copy records into one file. It can be turned back into text: guard it like the documents."""
    selection = _select(keys, prefix, scope, tenant, secret_file, model, older_than, unused_for)
    folder = _folder(store)
    from kvweave.cli.cache_change import export_archive

    return export_archive(folder, selection, archive, force=force, as_json=json)


@cache.command("import")
def import_(
    archive: Annotated[Path, typer.Argument(metavar="IN.tar", help="What export has written.", show_default=False)],
    store: Store = None,
    create: Annotated[bool, typer.Option("--create", help="Make the folder a store if it is empty or missing.")] = False,
    json: Json = False,
    log_level: LogLevel = "warning",
) -> int:
    """Add the records of an archive, each checked in full. Exit code 1: some were left out."""
    folder = _folder(store, create=create)
    from kvweave.cli.cache_change import import_archive

    return import_archive(folder, archive, create=create, as_json=json)


def _folder(store: str | None, *, create: bool = False) -> Path:
    """The folder meant; ``InvalidOption`` if there is none, or it isn't a store."""
    from kvweave.store.selection import require_store

    if store is not None:
        root = Path(store).expanduser()
    elif (tier := disk_tier_from_environment()) is not None:
        root = Tiers(disk=tier).disk_folder()[0]
    else:
        raise InvalidOption("Which store? Give --store DIR, the folder of a disk tier.")
    if not create:
        require_store(root)
    return root


def _select(
    keys: list[str] | None,
    prefix: str | None = None,
    scope: str | None = None,
    tenant: str | None = None,
    secret_file: Path | None = None,
    model: str | None = None,
    older_than: str | None = None,
    unused_for: str | None = None,
    pinned: bool | None = None,
) -> Selection:
    from kvweave.store.selection import Selection, tag_of

    if tenant is not None and scope is not None:
        raise InvalidOption("--tenant and --scope name the same thing. Leave one of them out.")
    return Selection(
        keys=tuple(keys or ()),
        prefix=prefix,
        scope=scope if tenant is None else tag_of(tenant, read_secret(secret_file)),
        model=model,
        older_than=_seconds(older_than),
        unused_for=_seconds(unused_for),
        pinned=pinned,
    )


def _seconds(span: str | None) -> float | None:
    from kvweave.store.selection import parse_age

    return None if span is None else parse_age(span)


def _named(selection: Selection, everything: bool = False) -> Selection:
    """Nothing is changed because an option was forgotten."""
    if selection.everything != everything:
        raise InvalidOption(
            "--all together with other conditions contradicts itself. Leave one out."
            if everything
            else "Which records? Give keys or a condition, as in --model or --tenant."
        )
    return selection
