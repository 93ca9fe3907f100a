"""The model's own forward, driven from outside: no decoder layer is re-implemented.

One attention function is registered with transformers; everything that differs between prefill, decode and fusion comes
in through one keyword, ``kv_plan``, which transformers hands through to it. A forward pre-hook on every decoder layer
narrows the hidden states to the rows that go on, and replaces cos/sin by 1/0, so that queries and keys reach the
attention function unrotated. The executor rotates them with the model file's own function.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kvweave.core.spec import KVLayout, LayerSpec
from kvweave.errors import BrokenModel, KvweaveError, UnsupportedModel
from kvweave.kv.rotary import LayerRotary, Rotary, identity_like
from kvweave.models.support import check_supported

ATTENTION_NAME = "kvweave"


class LayerDriver(Protocol):
    """What a forward pass is steered by; the executor's step implements it."""

    def narrow(self, layer: int) -> Tensor | None:
        """Indices into the current rows that enter ``layer`` (``num_layers``: the final norm); None keeps all."""
        ...

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, options: dict[str, Any]) -> Tensor:
        """q [heads, n, dim], k and v [kv_heads, n, dim], unrotated -> [n, heads, value_dim]."""
        ...


class DecoderAdapter:
    """A loaded decoder-only model behind the ``LayerDriver`` protocol."""

    def __init__(self, model: Any, device: torch.device) -> None:
        check_supported(model.config)
        self.model = model
        self.device = device
        self.config: Any = model.config
        self.decoder: Any = model.model
        self.layers: list[Any] = list(self.decoder.layers)[: self.config.num_hidden_layers]
        self.context_length = int(getattr(self.config, "max_position_embeddings", 0) or 2**31)
        self.vocab_size = int(self.config.vocab_size)
        self._driver: LayerDriver | None = None  # of the forward that is running: the final norm gets no keywords
        _register_attention()
        model.set_attn_implementation(ATTENTION_NAME)
        self._install_hooks()
        self.rotary, self.layout = _probe(self)

    @classmethod
    def load(cls, directory: Path, *, dtype: torch.dtype, device: torch.device) -> DecoderAdapter:
        """Load a Hugging Face directory. Raises ``BrokenModel`` or ``UnsupportedModel``."""
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging as transformers_logging

        try:
            config = AutoConfig.from_pretrained(directory)
        except (OSError, ValueError, KeyError) as error:
            raise UnsupportedModel(f"{directory}: config.json names no model transformers knows: {_line(error)}") from error
        check_supported(config)
        bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()
        try:
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, use_safetensors=True)
        except KvweaveError:
            raise
        except Exception as error:  # transformers raises whatever a broken file provokes
            raise BrokenModel(f"{directory}: the weights can't be loaded: {_line(error)}. Fetch the model again.") from error
        finally:
            if bars:
                transformers_logging.enable_progress_bar()
        return cls(model.to(device).eval(), device)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer, of the generation config or the model's."""
        generation = getattr(self.model, "generation_config", None)
        ids = getattr(generation, "eos_token_id", None) or getattr(self.config, "eos_token_id", None)
        return frozenset([] if ids is None else [ids] if isinstance(ids, int) else ids)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.get_input_embeddings().weight.dtype

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, driver: LayerDriver) -> Tensor:
        """Run rows ``token_ids`` [n] at ``positions`` [n] -> logits [rows that reach the final norm, vocabulary]."""
        self._driver = driver
        try:
            out = self.model(input_ids=token_ids[None], position_ids=positions[None], use_cache=False, kv_plan=driver)
        finally:
            self._driver = None
        return out.logits[0]

    @contextmanager
    def native(self) -> Iterator[Any]:
        """The untouched model with its own eager attention, for the self-check."""
        self.model.set_attn_implementation("eager")
        try:
            yield self.model
        finally:
            self.model.set_attn_implementation(ATTENTION_NAME)

    def _install_hooks(self) -> None:
        for index, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(_narrowing_hook(index), with_kwargs=True)
        self.decoder.norm.register_forward_pre_hook(self._final_hook)

    def _final_hook(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Only rows whose logits are wanted go through the final norm and the LM head."""
        keep = self._driver.narrow(self.num_layers) if self._driver is not None else None
        return None if keep is None else (args[0][:, keep], *args[1:])


def _narrowing_hook(index: int) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        driver = kwargs.get("kv_plan")
        if driver is None:
            return None
        hidden = args[0] if args else kwargs["hidden_states"]
        keep = driver.narrow(index)
        if keep is not None:
            hidden = hidden[:, keep]
        rows = hidden.shape[1]
        cos, sin = kwargs["position_embeddings"]
        kwargs["position_embeddings"] = identity_like(cos, sin, rows)
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = kwargs["position_ids"][:, :rows]  # only its shape is used: the executor rotates
        if args:
            return (hidden, *args[1:]), kwargs
        kwargs["hidden_states"] = hidden
        return args, kwargs

    return hook


def _register_attention() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _attention_function)


def _attention_function(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kv_plan: LayerDriver,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature, q [1, heads, n, dim] -> ([1, n, heads, value_dim], no weights)."""
    options = {
        "scaling": query.shape[-1] ** -0.5 if scaling is None else scaling,
        "window": sliding_window,
        "softcap": softcap,
        "sinks": s_aux,
    }
    return kv_plan.attend(module.layer_idx, query[0], key[0], value[0], options)[None], None


class _Probe:
    """A driver that records what reaches attention in every layer; attention itself returns zeros."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[Tensor, Tensor, Tensor, dict[str, Any]]] = {}

    def narrow(self, layer: int) -> Tensor | None:
        return None

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, options: dict[str, Any]) -> Tensor:
        self.seen[layer] = (queries, keys, values, options)
        return queries.new_zeros(queries.shape[1], queries.shape[0], values.shape[2])


def _probe(adapter: DecoderAdapter) -> tuple[Rotary, KVLayout]:
    """Find geometry and rotation of every layer by running five tokens with and without cos/sin.

    A layer whose keys are the same both times has no RoPE. Attention returns zeros in both runs, so hidden states agree.
    """
    ids = torch.arange(1, 6, device=adapter.device) % adapter.vocab_size
    at = torch.arange(3, 8, device=adapter.device)
    plain, rotated = _Probe(), _Probe()
    tables: dict[int, tuple[Tensor, Tensor]] = {}
    adapter.forward(ids, at, plain)

    def restore(index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            kwargs["position_embeddings"] = tables[index]
            return args, kwargs

        return hook

    def remember(index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tables[index] = kwargs["position_embeddings"]

        return hook

    handles = []
    for index, layer in enumerate(adapter.layers):  # around the narrowing hook: one in front of it, one behind it
        handles.append(layer.register_forward_pre_hook(remember(index), with_kwargs=True, prepend=True))
        handles.append(layer.register_forward_pre_hook(restore(index), with_kwargs=True))
    try:
        adapter.forward(ids, at, rotated)
    finally:
        for handle in handles:
            handle.remove()
    if set(plain.seen) != set(range(adapter.num_layers)):
        raise UnsupportedModel("Some layers of this model don't use the attention interface, so they can't be driven.")
    rotaries: list[LayerRotary | None] = []
    specs: list[LayerSpec] = []
    for index in range(adapter.num_layers):
        queries, keys, values, options = plain.seen[index]
        rotates = not torch.equal(keys, rotated.seen[index][1])
        rotaries.append(_layer_rotary(adapter, index) if rotates else None)
        specs.append(
            LayerSpec(
                num_heads=queries.shape[0],
                num_kv_heads=keys.shape[0],
                key_dim=keys.shape[2],
                value_dim=values.shape[2],
                rotates=rotates,
                window=options["window"],
            )
        )
    return Rotary(tuple(rotaries)), KVLayout(tuple(specs), plain.seen[0][1].dtype)


def _layer_rotary(adapter: DecoderAdapter, index: int) -> LayerRotary:
    attention = adapter.layers[index].self_attn
    apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    embedding = adapter.decoder.rotary_emb
    if apply is None:
        raise UnsupportedModel(f"Layer {index}: the model file has no apply_rotary_pos_emb, so keys can't be re-rotated.")
    layer_types = getattr(adapter.config, "layer_types", None)
    by_type = "layer_type" in inspect.signature(embedding.forward).parameters and layer_types
    kind = layer_types[index] if by_type and layer_types else None
    like = torch.empty(1, dtype=adapter.dtype, device=adapter.device)

    def tables(positions: Tensor) -> tuple[Tensor, Tensor]:
        return embedding(like, positions[None], kind) if kind else embedding(like, positions[None])

    return LayerRotary(kind, tables, apply)


def _line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0][:200]
