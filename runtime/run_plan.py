"""What a run will take, computed from a pack alone."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import torch

from runtime.artifacts.pack import Pack
from runtime.artifacts.residual_decoder import work_bytes
from runtime.config import RunSettings
from runtime.decode.bank import linear_bytes
from runtime.memory.plan import MemoryPlan, make_plan
from runtime.model.host import context_limit
from runtime.model.kv import bytes_per_token
from runtime.model.loader import TORCH_DTYPES

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def compute_dtype(pack: Pack, settings: RunSettings) -> torch.dtype:
    """The type of the arithmetic: as asked for, or as the experts are stored."""
    return TORCH_DTYPES[pack.spec.dtype] if settings.dtype == "auto" else _DTYPES[settings.dtype]


def plan_run(pack: Pack, settings: RunSettings) -> MemoryPlan:
    """What goes where, before anything is loaded.

    Args:
        pack: an opened pack.
        settings: of the run.

    Raises:
        PlanError: it does not fit; the message names what would.
    """
    dtype, spec = compute_dtype(pack, settings), pack.spec
    config = json.loads((pack.config_folder / "config.json").read_text(encoding="utf-8"))
    dense = sum(math.prod(pack.dense_info(name).shape) for name in pack.dense_names()) * dtype.itemsize
    return make_plan(
        dense_bytes=dense,
        draft_bytes=(draft_bytes(pack, dtype) if settings.speculate and settings.prefetch_window else 0)
        + (record_bytes(pack) if pack.leans_on_draft else 0),
        kv_bytes_per_token=bytes_per_token(SimpleNamespace(**config), dtype),
        context_tokens=min(settings.context, context_limit(config)),
        slot_bytes=pack.target_slot_bytes,
        num_experts_total=spec.num_records,
        top_k=spec.top_k,
        num_moe_layers=len(spec.moe_layers),
        cache_size=settings.expert_cache_size,
        max_parallel_transfers=settings.max_parallel_transfers,
    )


def record_bytes(pack: Pack) -> int:
    """Memory of all draft records, and of decoding one target record by its own."""
    return pack.spec.num_records * pack.draft_slot_bytes + work_bytes(pack.target_layout)


def draft_bytes(pack: Pack, dtype: torch.dtype) -> int:
    """Memory of the draft bank in the forms that it chooses; unrounded linears lie in the run's type."""
    spec, total = pack.spec, 0
    for layer_id in spec.moe_layers:
        fmt = pack.draft_format(layer_id)
        gate_up = linear_bytes(fmt.gate_up, 2 * spec.moe_intermediate_size, spec.hidden_size, dtype)
        down = linear_bytes(fmt.down, spec.hidden_size, spec.moe_intermediate_size, dtype)
        total += spec.num_experts * (gate_up + down)
    return total
