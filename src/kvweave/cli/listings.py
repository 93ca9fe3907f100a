"""``kvweave models`` and ``kvweave techniques``: what there is to choose from."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from kvweave.cli.output import print_json, print_table


def show_models(*, as_json: bool) -> None:
    from kvweave.models.support import REFUSED, SUPPORTED

    if as_json:
        supported = [{"model_type": f.model_type, "notes": f.notes} for f in SUPPORTED.values()]
        refused = [{"model_type": kind, "reason": reason} for kind, reason in REFUSED.items()]
        print_json({"supported": supported, "refused": refused})
        return
    print_table("Supported", ("model_type", "notes"), [(f.model_type, f.notes) for f in SUPPORTED.values()])
    print_table("Refused", ("model_type", "why"), list(REFUSED.items()))


def show_techniques(*, as_json: bool) -> None:
    from kvweave.reuse.registry import DEFAULT_TECHNIQUE, techniques

    found = [_describe(name, cls, default=name == DEFAULT_TECHNIQUE) for name, cls in techniques().items()]
    if as_json:
        print_json({"techniques": found})
        return
    rows = []
    for item in found:
        options = ", ".join(f"{option['name']}={option['default']}" for option in item["options"])
        rows.append((item["name"] + (" (default)" if item["default"] else ""), item["reuse"], options, item["summary"]))
    print_table("Techniques", ("name", "reuse", "options", "what it does"), rows)


def _describe(name: str, cls: type[Any], *, default: bool) -> dict[str, Any]:
    options = [{"name": f.name, "type": str(f.type), "default": _default(f)} for f in dataclasses.fields(cls)]
    summary = (inspect.getdoc(cls) or "").partition("\n")[0].replace("``", "")
    return {"name": name, "reuse": cls.reuse, "default": default, "options": options, "summary": summary}


def _default(field: dataclasses.Field[Any]) -> Any:
    """None for an option that has to be given; what JSON can't hold is shown as text."""
    value = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
    if value is dataclasses.MISSING:
        return None
    return value if isinstance(value, bool | int | float | str | None) else str(value)
