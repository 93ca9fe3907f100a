"""What a request may ask for and a later version will do. It is refused here, and nowhere else."""

from __future__ import annotations

from kvweave.errors import UnsupportedParameter
from kvweave.protocol.edits import Edits


def refuse_edits(edits: Edits, path: str) -> None:
    """``path`` is where the ``cache`` object stands."""
    if edits:
        raise UnsupportedParameter(
            "Drop and reposition come in a later version. Leave them out, or delete old messages from the request.",
            param=path,
        )


def refuse_kind(kind: str, path: str) -> None:
    if kind in ("fixed", "updated"):
        raise UnsupportedParameter(f"{path}: '{kind}' comes in a later version. Use 'document' or 'text'.", param=path)


def refuse_template(template: str | None, path: str) -> None:
    if template is not None:
        raise UnsupportedParameter(
            f"{path}.template comes in a later version, with fixed and updated segments. Leave it out.",
            param=f"{path}.template",
        )
