"""The dense steps of a decoding pass beside torch's own operations: whether they agree, then how long they take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moespeq_cli.bench.geometry import Geometry
from moespeq_cli.bench.kernel_candidate import Call
from moespeq_cli.bench.kernel_time import L2_TIMES, MAX_LAYERS, Machine, replay
from moespeq_cli.bench.synthetic.models import MODELS, make_config
from moespeq_cli.bench.tables import markdown, number
from runtime.errors import InputError, KernelError
from runtime.kernels.rows import MAX_ROWS, Routing, RowOps
from runtime.kernels.rows_reference import TorchRows

KEYS = (256, 4096)  # that attention looks at
_TOLERANCE = 0.03  # of the largest number of a step: a few roundings to BF16
Result = dict[str, Any]
Run = Callable[[RowOps, int], Tensor]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a layer.

    Attributes:
        name: for the table.
        num_bytes: that it must read.
        run: computes it with some operations on the data of a layer, counted from 0 over as many as there are.
    """

    name: str
    num_bytes: int
    run: Run


class _Data:
    """Random tensors of a model's sizes for some rows.

    Args:
        config: of the library.
        rows: of x.
        l2_bytes: weights are made so often that the cache does not hold them.
    """

    def __init__(self, config: Any, rows: int, l2_bytes: int, device: str) -> None:
        self.config, self.rows, self._l2_bytes, self._device = config, rows, l2_bytes, device
        self._generator = torch.Generator(device).manual_seed(0)

    def normal(self, *sizes: int, scale: float = 1.0) -> Tensor:
        made = torch.randn(*sizes, generator=self._generator, device=self._device, dtype=torch.bfloat16)
        return made.mul_(scale)

    def weights(self, *sizes: int) -> list[Tensor]:
        """The same weight at different places."""
        first = self.normal(*sizes, scale=sizes[-1] ** -0.5)
        count = min(MAX_LAYERS, max(2, -(-L2_TIMES * self._l2_bytes // (2 * first.numel()))))
        return [first, *(first.clone() for _ in range(count - 1))]

    def steps(self) -> Iterator[Step]:
        config, rows = self.config, self.rows
        hidden, heads = config.hidden_size, config.num_attention_heads
        x, h = self.normal(rows, hidden), self.normal(rows, hidden)
        norm = self.normal(hidden)
        yield Step("norm", 2 * hidden, lambda ops, _: ops.norm(x, norm, None, 1e-6))
        if not getattr(config, "kv_lora_rank", None):
            yield from self._attention(x, h, hidden, heads)
        experts = getattr(config, "num_experts", None) or config.num_local_experts
        top_k = config.num_experts_per_tok
        router = self.weights(experts, hidden)
        index = torch.zeros(rows, top_k, dtype=torch.int32, device=self._device)
        to = Routing(index, torch.zeros(rows, top_k, device=self._device))

        def route(ops: RowOps, at: int) -> Tensor:
            ops.route(ops.linear(_pick(router, at), None, x), to, True, True)
            return to.weights

        yield Step("router, linear and top k", 2 * experts * hidden, route)
        inner = getattr(config, "shared_expert_intermediate_size", None)
        inner = inner or getattr(config, "n_shared_experts", 0) * getattr(config, "moe_intermediate_size", 0)
        if inner:
            gate_up, down, middle = (
                self.weights(2 * inner, hidden),
                self.weights(hidden, inner),
                self.normal(rows, inner),
            )
            yield Step("shared gate and up", 4 * inner * hidden, lambda ops, at: ops.swiglu(_pick(gate_up, at), x))
            yield Step(
                "shared down and sums",
                2 * inner * hidden,
                lambda ops, at: ops.join(_pick(down, at), middle, h, x, None),
            )
        head = self.weights(config.vocab_size, hidden)
        yield Step("head", 2 * config.vocab_size * hidden, lambda ops, at: ops.linear(_pick(head, at), None, x))

    def _attention(self, x: Tensor, h: Tensor, hidden: int, heads: int) -> Iterator[Step]:
        config, rows = self.config, self.rows
        size = getattr(config, "head_dim", None) or hidden // heads
        key_heads = config.num_key_value_heads
        width = (heads + 2 * key_heads) * size
        qkv, out = self.weights(width, hidden), self.weights(hidden, heads * size)
        yield Step("queries, keys, values", 2 * width * hidden, lambda ops, at: ops.linear(_pick(qkv, at), None, x))
        several = self.normal(rows, width)
        tables = self.normal(rows, size), self.normal(rows, size)
        keys, values = (self.normal(key_heads, max(KEYS), size) for _ in range(2))
        first = torch.arange(rows, device=self._device)
        yield Step("rotary and KV", 0, lambda ops, _: ops.rotate(several, *tables, first, keys, values))
        q = self.normal(rows, heads, size)
        for length in KEYS:
            last = first + length - rows

            def attend(ops: RowOps, _: int, last: Tensor = last, length: int = length) -> Tensor:
                return ops.attend(q, keys, values, last, length, size**-0.5, None)

            yield Step(f"attention, {length} keys", 4 * key_heads * size * length, attend)
        y = self.normal(rows, heads * size)
        yield Step("output and sum", 2 * hidden * heads * size, lambda ops, at: ops.add(_pick(out, at), None, y, h))


def _pick(weights: Sequence[Tensor], at: int) -> Tensor:
    return weights[at % len(weights)]


def measure_dense(
    geometries: Sequence[Geometry], ops: RowOps, machine: Machine, advance: Callable[[], None], device: str = "cuda"
) -> list[Result]:
    """Check and time every step of every model, at one row and at 8.

    Args:
        geometries: of `MODELS`, others are left out.
        ops: what is measured.
        machine: for the floor.
        advance: called after each model.

    Raises:
        InputError: no geometry of a whole model among them.
        KernelError: a step whose result is not torch's; nothing of its model is reported.
    """
    known = [geometry for geometry in geometries if geometry.name in MODELS]
    if not known:
        raise InputError(
            expected=f"a --geometry of {', '.join(MODELS)} for the dense part", found="none", mend="name one of them"
        )
    results = []
    for geometry in known:
        config = make_config(geometry.name)
        rows = [
            row
            for count in (1, MAX_ROWS)
            for row in _rows(_Data(config, count, machine.l2_bytes, device), ops, machine)
        ]
        results.append({"geometry": geometry.name, "rows": rows})
        advance()
    return results


def _rows(data: _Data, ops: RowOps, machine: Machine) -> list[Result]:
    rows, library = [], TorchRows()
    for step in data.steps():
        ours, theirs = step.run(ops, 0).clone(), step.run(library, 0)
        error = float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())
        if not error <= _TOLERANCE:
            raise KernelError(
                expected=f"torch's own result for {step.name} of {data.rows} rows",
                found=f"{error:.3f} of its largest number off",
                mend="this is a fault of the kernel or of the GPU: report it with this message",
            )
        times = {name: _time(step, by) for name, by in (("ours", ops), ("torch", library))}
        floor_us = step.num_bytes / machine.read_gb_per_s / 1e3
        rows.append(
            {"rows": data.rows, "step": step.name, "bytes": step.num_bytes, "floor_us": floor_us, "times": times}
        )
    return rows


def _time(step: Step, ops: RowOps) -> dict[str, Any]:
    calls: list[Call] = []
    for at in range(24 if step.num_bytes < 200e6 else 6):

        def call(at: int = at) -> None:
            step.run(ops, at)

        calls.append(call)
    return dataclasses.asdict(replay(calls))


def dense_text(results: Sequence[Result]) -> str:
    """Everything as Markdown."""
    parts = ["Dense steps of a decoding pass, microseconds a step in a graph of them"]
    for result in results:
        lines = [
            (
                row["step"],
                str(row["rows"]),
                number(row["floor_us"], 1),
                *(f"{number(row['times'][name]['median_us'])}" for name in ("ours", "torch")),
            )
            for row in result["rows"]
        ]
        table = markdown(("step", "rows", "floor, us", "ours, us", "torch's operations, us"), lines)
        parts.append(f"{result['geometry']}\n\n{table}")
    return "\n\n".join(parts)
