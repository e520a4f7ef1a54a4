"""The library's model without its experts: built on the meta device, dense weights put in one by one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runtime.artifacts.checkpoint import Checkpoint
from runtime.errors import InputError, brief
from runtime.model import experts
from runtime.model.families import MoeSpec, dense_names, memory_name
from runtime.model.support import check_model

TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def build(config_folder: Path, dtype: torch.dtype, spec: MoeSpec, attention: str | None = None) -> Any:
    """A causal language model of the library on the meta device, its routed experts without parameters.

    Args:
        config_folder: holds config.json.
        dtype: of the arithmetic; parameters that the library keeps in float32 stay so.
        spec: what the checkpoint holds.
        attention: name of a registered attention function; the library chooses otherwise.

    Returns:
        The model, in evaluation mode. Buffers that no checkpoint stores (rotary frequencies) are real.

    Raises:
        InputError: transformers does not know the family, or it is not one that the stages can run.
    """
    model = _on_meta(config_folder, dtype, attention)
    check_model(model, spec)
    _restore_buffers(model)
    for layer in decoder_layers(model):
        module = experts.find_experts(layer)
        if module is not None:
            experts.empty(module)
    return model.eval()


def require_supported(checkpoint: Checkpoint, spec: MoeSpec) -> None:
    """Refuse, before any work, a model that could not be built or filled; no weight is read or allocated.

    Raises:
        InputError: as `build` and `load_dense`.
    """
    model = _on_meta(checkpoint.folder, torch.float32)
    check_model(model, spec)
    memory = {memory_name(spec, name): name for name in dense_names(checkpoint, spec)}
    places = [(name, *_place(model, name, "")) for name in memory]
    _refuse_unknown(spec, [memory[name] for name, table, _ in places if table is None and not _ignorable(name, spec)])
    for name, table, leaf in places:
        if table is not None:
            _check_shape(memory[name], checkpoint.tensors[memory[name]].shape, table[leaf])
    wanted = {name for name in model.state_dict() if not any(part in name for part in _EXPERTS)}
    if getattr(model.config, "tie_word_embeddings", False):
        wanted.discard("lm_head.weight")
    _refuse_missing(sorted(wanted - set(memory)))


_EXPERTS = tuple(f".experts.{name}" for name in experts.PARAMETERS)


def _on_meta(config_folder: Path, dtype: torch.dtype, attention: str | None = None) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    experts.register()
    try:
        config = AutoConfig.from_pretrained(config_folder)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        named = {} if attention is None else {"attn_implementation": attention}
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                config, dtype=dtype, experts_implementation=experts.IMPLEMENTATION, **named
            )
    except Exception as error:  # whatever a configuration makes of the library's code
        raise InputError(
            expected=f"a model that this transformers can build from {config_folder / 'config.json'}",
            found=brief(error),
            mend="check config.json, or upgrade transformers for a newer family",
        ) from error


def decoder_layers(model: Any) -> list[nn.Module]:
    """The decoder layers in order."""
    return list(model.model.layers)


def cache_argument(module: nn.Module) -> str | None:
    """The name under which a forward takes the KV cache: it was `past_key_values`, and newer releases say `cache`."""
    names = inspect.signature(module.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in names), None)


def _restore_buffers(model: nn.Module) -> None:
    """Make modules whose buffers are computed, not stored, again on the CPU."""
    stored = set(model.state_dict())
    for name, module in list(model.named_modules()):
        computed = [
            b for b, t in module._buffers.items() if t is not None and t.is_meta and f"{name}.{b}" not in stored
        ]
        if computed:
            parent = model.get_submodule(name.rpartition(".")[0])
            with torch.device("cpu"):
                made: Any = type(module)
                setattr(parent, name.rpartition(".")[2], made(config=model.config))


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Put the buffers that are real, such as rotary frequencies, on a device."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


def load_dense(model: Any, spec: MoeSpec, read: Callable[[str], Tensor], names: Iterable[str]) -> None:
    """Put every tensor outside the routed experts into the model.

    Args:
        model: from `build`.
        spec: what the model is.
        read: gives a tensor by its disk name.
        names: the disk names.

    Raises:
        InputError: tensors that the model lacks or the checkpoint lacks; nothing is initialised at random.
    """
    _assign(model, spec, read, {memory_name(spec, name): name for name in names}, "")
    if getattr(model.config, "tie_word_embeddings", False):
        model.lm_head.weight = model.model.embed_tokens.weight
    _require_real(model, "")


def load_module(module: nn.Module, prefix: str, spec: MoeSpec, read: Callable[[str], Tensor], names: list[str]) -> None:
    """Put the tensors below `prefix` (a name in memory, such as `model.layers.3`) into one module of the model."""
    wanted = {memory_name(spec, name): name for name in names}
    inside = {name: disk for name, disk in wanted.items() if name.startswith(prefix + ".")}
    _assign(module, spec, read, inside, prefix + ".")
    _require_real(module, prefix + ".")


def drop_module(module: nn.Module) -> None:
    """Give the memory of a loaded module back; it can be loaded again."""
    for part in module.modules():
        tables: list[dict[str, Any]] = [part._parameters, part._buffers]
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None and not (table is part._buffers and name in part._non_persistent_buffers_set):
                    gone = torch.empty_like(tensor, device="meta")
                    table[name] = nn.Parameter(gone, requires_grad=False) if table is part._parameters else gone


def _assign(
    module: nn.Module, spec: MoeSpec, read: Callable[[str], Tensor], names: dict[str, str], prefix: str
) -> None:
    unknown = []
    for memory, disk in names.items():
        table, leaf = _place(module, memory, prefix)
        if table is None:
            if not _ignorable(memory, spec):
                unknown.append(disk)
            continue
        tensor, slot = read(disk), table[leaf]
        _check_shape(disk, tuple(tensor.shape), slot)
        tensor = tensor.to(slot.dtype)
        table[leaf] = nn.Parameter(tensor, requires_grad=False) if isinstance(slot, nn.Parameter) else tensor
    _refuse_unknown(spec, unknown)


def _place(module: nn.Module, memory: str, prefix: str) -> tuple[dict[str, Any] | None, str]:
    """The table of parameters or buffers in which a tensor has its place, None where it has none, and its key there."""
    owner_name, _, leaf = memory.removeprefix(prefix).rpartition(".")
    try:
        owner = module.get_submodule(owner_name)
    except AttributeError:
        return None, leaf
    tables: list[dict[str, Any]] = [owner._parameters, owner._buffers]
    return next((table for table in tables if table.get(leaf) is not None), None), leaf


def _check_shape(disk: str, shape: tuple[int, ...], slot: Tensor) -> None:
    if tuple(slot.shape) != tuple(shape):
        raise InputError(
            expected=f"{disk} of shape {list(slot.shape)}, as config.json says",
            found=str(list(shape)),
            mend="use the config.json that belongs to these weights",
        )


def _refuse_unknown(spec: MoeSpec, unknown: list[str]) -> None:
    if unknown:
        raise InputError(
            expected=f"only tensors that a {spec.model_type} model of this transformers has",
            found=f"{len(unknown)} others: {', '.join(unknown[:4])}{' ...' if len(unknown) > 4 else ''}",
            mend="use the transformers release that the model was made for",
        )


def _ignorable(name: str, spec: MoeSpec) -> bool:
    """Tensors that belong to no part of the model: rotary tables, tied heads, layers for predicting further tokens."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    beyond = layer is not None and int(layer[1]) >= spec.num_layers
    return beyond or name.endswith("rotary_emb.inv_freq") or name.endswith(".masked_bias")


def _require_real(module: nn.Module, prefix: str) -> None:
    named: Iterator[tuple[str, Tensor]] = iter([*module.named_parameters(), *module.named_buffers()])
    _refuse_missing([prefix + name for name, tensor in named if tensor.is_meta])


def _refuse_missing(missing: list[str]) -> None:
    if missing:
        raise InputError(
            expected="a value for every tensor of the model",
            found=f"{len(missing)} missing: {', '.join(missing[:4])}{' ...' if len(missing) > 4 else ''}",
            mend="download or copy the model again",
        )
