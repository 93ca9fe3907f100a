"""``kvweave doctor``: versions, measured speed, what was chosen, and whether a model runs right here."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvweave.cli.output import Progress, print_json, print_table
from kvweave.config import EngineConfig
from kvweave.errors import InvalidOption, ModelError, NotEnoughSpace

if TYPE_CHECKING:
    import torch

    from kvweave.llm import LLM

CHECK_FAILED = 3


@dataclass(frozen=True)
class Check:
    name: str
    ok: bool
    detail: str


def examine(model: str | None, options: dict[str, Any], *, as_json: bool, quiet: bool) -> int:
    """Print the report; returns the exit code."""
    config = EngineConfig.of(**options)
    progress = Progress(quiet)
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        checks = [_check_versions(), _check_home(config.home)]
        loaded: dict[str, Any] | None = None
        if model is not None:
            check, loaded = _try_model(model, options, progress)
            checks.append(check)
        with progress.status("Measuring"):
            machine = _measure(config, loaded)
    report = {
        "ok": all(check.ok for check in checks),
        "checks": [dataclasses.asdict(check) for check in checks],
        "versions": _versions(),
        "machine": machine,
        "model": loaded,
    }
    if as_json:
        print_json(report)
    else:
        _print(report)
    return 0 if report["ok"] else CHECK_FAILED


def _versions() -> dict[str, str]:
    names = ("kvweave", "torch", "transformers", "tokenizers", "safetensors", "numpy")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}


def _check_versions() -> Check:
    """Whether what is installed is what kvweave asks for."""
    from packaging.requirements import Requirement

    wrong = []
    for requirement in map(Requirement, importlib.metadata.requires("kvweave") or []):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is not installed")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}, needed {requirement.specifier}")
    return Check("packages", not wrong, "; ".join(wrong) or "all in their ranges")


def _check_home(home: Path | None) -> Check:
    """Whether models can be kept; the folder is not made for that."""
    from kvweave.models.sources import default_home

    folder = home or default_home()
    above = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not above.is_dir():
        return Check("home", False, f"'{above}' is not a folder; set KVWEAVE_HOME to one")
    if not os.access(above, os.W_OK | os.X_OK):
        return Check("home", False, f"'{folder}' can't be written; set KVWEAVE_HOME to a folder that can")
    return Check("home", True, os.fspath(folder))


def _try_model(model: str, options: dict[str, Any], progress: Progress) -> tuple[Check, dict[str, Any] | None]:
    """Load it, which includes the self-check; anything wrong with the model is the answer, not an error."""
    start = time.perf_counter()
    try:
        with progress.status(f"Loading {model}") as report:
            from kvweave.llm import LLM

            llm = LLM(model, progress=report, **options)
    except (ModelError, NotEnoughSpace) as error:
        return Check("model", False, str(error)), None
    with llm:
        found = _describe_model(llm, (time.perf_counter() - start) * 1e3)
    errors = found["self_check"]
    detail = f"self-check errors {errors['prefill_error']:.1e} (prefill), {errors['load_error']:.1e} (loaded chunks)"
    return Check("model", True, detail), found


def _describe_model(llm: LLM, load_ms: float) -> dict[str, Any]:
    built, parts = llm.built, llm.engine.parts
    return {
        "name": llm.name,
        "family": str(parts.adapter.config.model_type),
        "fingerprint": built.fingerprint.short,
        "dtype": _name(built.dtype),
        "threads": built.threads,
        "attention": built.attention,
        "context_length": parts.context_length,
        "kv_bytes_per_token": parts.pool.layout.bytes_per_token,
        "kv_pool_tokens": parts.pool.num_slots,
        "load_ms": load_ms,
        "self_check": dataclasses.asdict(built.check),
    }


def _measure(config: EngineConfig, loaded: dict[str, Any] | None) -> dict[str, Any]:
    """Rates of this machine, with what was chosen for the model, or would be for one."""
    import psutil
    import torch

    from kvweave.engine.tuning import gemm_rate, memory_bandwidth, pick_device, pick_dtype, pick_threads

    device = pick_device(config.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidOption(f"device '{config.device}': this torch sees no CUDA device. Use --device cpu.")
    threads = pick_threads(config.threads if loaded is None else loaded["threads"], device)
    dtype = _name(pick_dtype(config.dtype, device)) if loaded is None else loaded["dtype"]
    on_gpu = device.type == "cuda"
    return {
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if on_gpu else torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "threads": threads,
        "dtype": dtype,
        "gemm_gflops": {_name(d): gemm_rate(d, device).gflops for d in (torch.float32, torch.bfloat16)},
        "memory_gb_per_s": memory_bandwidth(device),
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _print(report: dict[str, Any]) -> None:
    checks = [("ok" if check["ok"] else "NO", check["name"], check["detail"]) for check in report["checks"]]
    print_table("Checks", ("", "check", "what was found"), checks)
    print_table("Versions", ("package", "version"), list(report["versions"].items()))
    machine = report["machine"]
    rates = ", ".join(f"{name} {rate:,.0f} GFLOP/s" for name, rate in machine["gemm_gflops"].items())
    rows = [
        ("device", f"{machine['device']} ({machine['device_name']}), {machine['cores']} cores"),
        ("memory", f"{machine['memory_bytes'] / 2**30:.1f} GiB, read at {machine['memory_gb_per_s']:.1f} GB/s"),
        ("matrix product", rates),
        ("chosen", f"{machine['dtype']}, threads: {machine['threads']}"),
    ]
    print_table("Machine", ("", ""), rows)
    if (model := report["model"]) is not None:
        rows = [
            ("model", f"{model['name']} ({model['family']}), fingerprint {model['fingerprint']}"),
            ("chosen", f"{model['dtype']}, attention '{model['attention']}'"),
            ("context", f"{model['context_length']:,} tokens"),
            ("KV pool", f"{model['kv_pool_tokens']:,} tokens of {model['kv_bytes_per_token']:,} bytes"),
            ("loading", f"{model['load_ms']:,.0f} ms"),
        ]
        print_table("Model", ("", ""), rows)
