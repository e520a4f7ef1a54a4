"""Calibration tokens through a model one decoder layer at a time, with one layer's weights in memory.

Sequences run unpadded, alone or beside others of the same length, so no token ever sees padding and counts are those of
the text itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from runtime.artifacts.checkpoint import Checkpoint
from runtime.memory import heap
from runtime.model import loader
from runtime.model.experts import Compute, ExpertMath, combine, find_experts, sorted_tokens
from runtime.model.families import LayerExperts, MoeSpec, dense_names, read_layer
from runtime.threads import set_threads, spread


@dataclass(frozen=True, slots=True)
class LayerTrace:
    """What the experts of one layer saw of one sequence.

    Attributes:
        sequence: index of the sequence.
        hidden: [T, H], the input of the experts, on the stream's device.
        top_k_index: int64 [T, k], on the CPU.
        top_k_weights: [T, k], on the stream's device.
    """

    sequence: int
    hidden: Tensor
    top_k_index: Tensor
    top_k_weights: Tensor


Observer = Callable[[LayerTrace], None]
CPU = torch.device("cpu")
BATCH_TOKENS = 2048  # that go through a layer together: enough rows an expert for its products to be worth their set-up
Weights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


class StreamedLayer:
    """One decoder layer, loaded while it is the current one.

    Attributes:
        layer_id: its true number.
        is_moe: whether it has routed experts; assigning other `experts` changes what `forward` computes.
    """

    def __init__(self, stream: LayerStream, layer_id: int, module: nn.Module) -> None:
        self._stream = stream
        self.layer_id = layer_id
        self.module = module
        self.is_moe = layer_id in stream.spec.moe_layers
        self._experts: LayerExperts | None = None
        if self.is_moe:
            self._experts = read_layer(stream.checkpoint, stream.spec, layer_id).to(stream.device)
        self._ready: dict[int, Weights] = {}
        self._making = threading.Lock()
        fused = find_experts(module) if self.is_moe else None
        self._fused: Any = fused
        self._current = threading.local()  # what stands for the experts, for each sequence that is under way
        if fused is not None:
            fused.compute = self._dispatch  # type: ignore[assignment]
        self.math = ExpertMath(fused) if fused is not None else None

    @property
    def experts(self) -> LayerExperts | None:
        """The routed experts in canonical form, in the type they are stored in or were assigned in."""
        return self._experts

    @experts.setter
    def experts(self, weights: LayerExperts | None) -> None:
        self._experts = None if weights is None else weights.to(self._stream.device)
        self._ready.clear()
        if weights is None:
            heap.give_back()

    def forward(self, hidden: list[Tensor], observe: Observer | None = None) -> list[Tensor]:
        """Run every sequence through the layer.

        Args:
            hidden: one [T_i, H] a sequence, as `embed` or the layer before gave them.
            observe: called once a sequence, in order, in a layer with experts.

        Returns:
            The layer's output in the same form.
        """

        def together(batch: range) -> tuple[list[Tensor], list[LayerTrace]]:
            traces: list[LayerTrace] = []
            with torch.no_grad():
                states = torch.stack([hidden[sequence] for sequence in batch])
                output = self._run(batch.start, states, self._compute(batch, traces if observe is not None else None))
            return [states.clone() for states in output.cpu()], traces

        outputs: list[Tensor] = []
        batches = equal_lengths([len(states) for states in hidden])
        for states, traces in spread(together, batches, self._stream.workers):
            for trace in traces:
                assert observe is not None
                observe(trace)
            outputs += states
        return outputs

    def run(self, sequence: int, states: Tensor, compute: Compute) -> Tensor:
        """One sequence through the layer, with gradients where they are enabled.

        Args:
            sequence: its index, for masks and positions.
            states: [T, H], the layer's input.
            compute: the routed experts, as `runtime.model.experts` describes them; not called in a dense layer.

        Returns:
            [T, H] on the stream's device.
        """
        return self._run(sequence, states[None], compute)[0]

    def _run(self, sequence: int, states: Tensor, compute: Compute) -> Tensor:
        """Sequences of one length, [B, T, H] to [B, T, H]; `sequence` is any of them."""
        self._current.compute = compute
        try:
            arguments = self._stream.arguments(sequence, self.layer_id)
            result: Any = self.module(states.to(self._stream.device), **arguments)
        finally:
            del self._current.compute
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output

    def _dispatch(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        compute: Compute = self._current.compute
        return compute(hidden, top_k_index, top_k_weights)

    def forget_copies(self) -> None:
        """Give back the copies of the experts in the arithmetic's type; a next pass makes them again."""
        self._ready.clear()
        heap.give_back()

    def drop(self) -> None:
        """Give the layer's memory back. The model keeps its module, so nothing large may hang on that."""
        if self._fused is not None:
            self._fused.compute = None  # knows this layer, and what observed it
        loader.drop_module(self.module)
        self.experts = None

    def _compute(self, batch: range, traces: list[LayerTrace] | None) -> Compute:
        """The experts for sequences of one length; what they are given goes to `traces`."""

        def compute(hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            if traces is not None:
                parts = (given.chunk(len(batch)) for given in (hidden, top_k_index.cpu(), top_k_weights))
                traces.extend(LayerTrace(*trace) for trace in zip(batch, *parts, strict=True))
            top_k = top_k_index.shape[1]
            outputs = hidden.new_empty(top_k_index.numel(), hidden.shape[-1])
            assert self.math is not None
            for expert_id, places in sorted_tokens(top_k_index).items():
                gate_up, down, gate_up_bias, down_bias = self.weights(expert_id, hidden.dtype)
                x = hidden.index_select(0, places // top_k)
                outputs.index_copy_(0, places, self.math.forward(x, gate_up, down, gate_up_bias, down_bias))
            return combine(outputs.view(*top_k_index.shape, -1), top_k_weights)

        return compute

    def weights(self, expert_id: int, dtype: torch.dtype) -> Weights:
        """gate_up [2I, H], down [H, I] and their biases in the arithmetic's type, made once a layer."""
        with self._making:
            if expert_id not in self._ready:
                self._ready[expert_id] = self._make(expert_id, dtype)
            return self._ready[expert_id]

    def _make(self, expert_id: int, dtype: torch.dtype) -> Weights:
        assert self._experts is not None
        one = self._experts.expert(expert_id)
        bias = None
        if one.gate_bias is not None and one.up_bias is not None:
            bias = torch.cat([one.gate_bias, one.up_bias]).to(dtype)
        down_bias = None if one.down_bias is None else one.down_bias.to(dtype)
        inner, hidden = one.gate_proj.shape
        gate_up = torch.empty(2 * inner, hidden, dtype=dtype, device=one.gate_proj.device)
        gate_up[:inner] = one.gate_proj  # into place: a copy that is freed between copies that stay leaves a hole
        gate_up[inner:] = one.up_proj
        return gate_up, one.down_proj.to(dtype), bias, down_bias


def equal_lengths(lengths: Sequence[int]) -> list[range]:
    """Neighbouring sequences of one length, in batches of at most BATCH_TOKENS tokens, or of one sequence."""
    batches: list[range] = []
    for place, length in enumerate(lengths):
        last = batches[-1] if batches else range(0)
        if last and lengths[last.start] == length and (len(last) + 1) * length <= BATCH_TOKENS:
            batches[-1] = range(last.start, place + 1)
        else:
            batches.append(range(place, place + 1))
    return batches


class _Catcher(nn.Module):
    """Stands in for a layer to learn with which arguments the model calls it."""

    def __init__(self, layer: nn.Module, caught: list[dict[str, Any]]) -> None:
        super().__init__()
        for name in ("attention_type", "layer_type"):
            if hasattr(layer, name):
                setattr(self, name, getattr(layer, name))
        self._caught = caught

    def forward(self, hidden_states: Tensor, **arguments: Any) -> Tensor:
        self._caught.append(arguments)
        return hidden_states


class LayerStream:
    """A model of which one decoder layer at a time is in memory, with the head from when it is first used.

    Attributes:
        device: where the layers, the norm and the head are and compute. Hidden states come and go in the CPU's memory.
        workers: how many sequences go through a layer at a time.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: MoeSpec,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
    ) -> None:
        """Build the model; none of its weights are read yet."""
        heap.share_one()
        self.checkpoint = checkpoint
        self.spec = spec
        self.dtype = dtype
        self.device = device
        threads = set_threads(0, spec.expert_parameters * dtype.itemsize)
        self.workers = threads if device.type == "cpu" else 1
        self._names = dense_names(checkpoint, spec)
        self._model = loader.build(checkpoint.folder, dtype, spec)
        loader.move_buffers(self._model, device)
        self._layers = loader.decoder_layers(self._model)
        self._arguments: list[list[dict[str, Any]]] = []
        self._tied = bool(getattr(self._model.config, "tie_word_embeddings", False))

    def _load(self, prefix: str) -> None:
        module = self._model.get_submodule(prefix)
        loader.load_module(module, prefix, self.spec, self._read, self._names)

    def _read(self, name: str) -> Tensor:
        return self.checkpoint.read(name).to(self.device)

    def _load_embedding(self) -> None:
        if self._tied and not self._model.lm_head.weight.is_meta:
            self._model.model.embed_tokens.weight = self._model.lm_head.weight
        else:
            self._load("model.embed_tokens")

    def _load_head(self) -> None:
        """Read the final norm and the head, unless they are there."""
        if self._model.lm_head.weight.is_meta:
            self._load("model.norm")
            if self._tied:
                self._load("model.embed_tokens")
                self._model.lm_head.weight = self._model.model.embed_tokens.weight
                loader.drop_module(self._model.model.embed_tokens)
            else:
                self._load("lm_head")

    def drop_head(self) -> None:
        """Give the memory of the head back; it is read again when it is used again."""
        for module in (self._model.model.norm, self._model.lm_head):
            loader.drop_module(module)

    def arguments(self, sequence: int, layer_id: int) -> dict[str, Any]:
        """With what the model calls a layer for one sequence: masks, positions, rotary tables."""
        return self._arguments[sequence][layer_id]

    @torch.no_grad()
    def embed(self, input_ids: list[Tensor]) -> list[Tensor]:
        """Hidden states before the first layer; the embedding is in memory meanwhile.

        Args:
            input_ids: one int64 [T_i] a sequence.

        Returns:
            One [T_i, H] a sequence, on the CPU.
        """
        self._arguments = [[] for _ in input_ids]
        hidden = []
        self._load_embedding()
        real = self._model.model.layers
        norm, self._model.model.norm = self._model.model.norm, nn.Identity()
        try:
            for caught, ids in zip(self._arguments, input_ids, strict=True):
                self._model.model.layers = nn.ModuleList(_Catcher(layer, caught) for layer in self._layers)
                given = ids[None].to(self.device)
                hidden.append(self._model.model(input_ids=given, use_cache=False).last_hidden_state[0].cpu())
        finally:
            self._model.model.layers = real
            self._model.model.norm = norm
            loader.drop_module(self._model.model.embed_tokens)
        return hidden

    def layers(self, order: Iterable[int] | None = None) -> Iterator[StreamedLayer]:
        """The layers, each loaded when it comes and dropped when the next one is asked for.

        Args:
            order: true layer numbers; None takes all, the first one first.
        """
        for layer_id in range(len(self._layers)) if order is None else order:
            module = self._layers[layer_id]
            loader.load_module(module, f"model.layers.{layer_id}", self.spec, self._read, self._names)
            layer = StreamedLayer(self, layer_id, module)
            yield layer
            layer.drop()

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """[T, H] after the last layer to [T, vocab_size], on the stream's device."""
        return self.head(self.normed(hidden))

    def normed(self, hidden: Tensor) -> Tensor:
        """[T, H] after the last layer to [T, H], the input of the head; with gradients where they are enabled."""
        self._load_head()
        normed: Tensor = self._model.model.norm(hidden[None].to(self.device))[0]
        return normed

    def head(self, normed: Tensor, weight: Tensor | None = None) -> Tensor:
        """[T, H] from `normed` to logits [T, vocab_size]; with gradients where they are enabled.

        Args:
            normed: the input of the head.
            weight: [vocab_size, H] in place of the model's own.
        """
        self._load_head()
        head = self._model.lm_head
        logits: Tensor = head(normed) if weight is None else nn.functional.linear(normed, weight, head.bias)
        return logits if self.logits_scale == 1 else logits / self.logits_scale

    @property
    def logits_scale(self) -> float:
        """What the head's outputs are divided by; 1 in most families."""
        return float(getattr(self._model.config, "logits_scaling", None) or 1)

    @property
    def head_weight(self) -> Tensor:
        """[vocab_size, H]."""
        self._load_head()
        weight: Tensor = self._model.lm_head.weight
        return weight
