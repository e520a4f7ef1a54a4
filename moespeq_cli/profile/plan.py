"""What a profile would take: memory phase by phase, bytes to read and time, from sizes and short measurements."""

from __future__ import annotations

import math

import torch

from moespeq_cli import estimate
from moespeq_cli.estimate import PROCESS_BYTES, Estimate, LayerSizes, forward_operations
from moespeq_cli.profile.build import DTYPES, ProfileJob
from moespeq_cli.profile.measure import LOGIT_ROWS, NEXT_LAYER_TOKENS
from moespeq_cli.profile.probe import PROBE_BITS
from moespeq_cli.profile.probing import PROBE_COPIES
from moespeq_cli.profile.scores import WAITING_BYTES, Scores, rounding_error
from moespeq_cli.profile.sensitivity import HEAD_TOKENS
from runtime.model.families import PROJECTIONS, read_expert
from runtime.model.stream import equal_lengths
from runtime.threads import set_threads

SLACK = 1.15  # what the allocator keeps, and temporaries of single operations; docs/benchmarks compares
STARTUP_S = 5.0  # imports, texts, pictures
BLOCK_ROWS = 256
MOST_ROWS = 256  # of a product that is timed; more are no faster each


class ProfilePlan:
    """The sizes of a job and what follows from them."""

    def __init__(self, job: ProfileJob) -> None:
        self.job, self.spec = job, job.spec
        self.sizes = LayerSizes.of(job.checkpoint, job.spec)
        self.lengths = [len(sequence.input_ids) for sequence in job.sequences]
        self.backward = self.lengths[: job.num_backward]
        self.probed = self.lengths[: job.num_probed]
        self.vocab = self.sizes.embedding_weights // self.spec.hidden_size

    def peak_memory_bytes(self) -> int:
        """Of the process at its worst time; an upper bound."""
        return PROCESS_BYTES + int(SLACK * max(self.phases().values()))

    def phases(self) -> dict[str, int]:
        """Bytes of tensors in each phase: weights, hidden states, and what single operations have at once."""
        sizes, job = self.sizes, self.job
        experts, dense, words = sizes.expert_weights, sizes.dense_weights, sizes.embedding_weights
        stored = sizes.expert_bytes // experts  # bytes a weight
        item = DTYPES[job.dtype].itemsize
        states = job.activation_bytes()
        layer = (stored + item) * experts
        if job.quantized is not None:  # dequantised all at once, then gate and up side by side
            layer = max(layer, item * experts * 5 // 3)
        found = {
            "embedding": states + (stored + item) * words,
            "forward": states + layer + item * dense + self._forward_bytes(item),
        }
        if job.quantized is not None:
            found["logits"] = states + max((stored + item) * words, item * words + 6 * 4 * LOGIT_ROWS * self.vocab)
        if self.backward:
            hidden = 3 * 4 * sum(self.backward) * self.spec.hidden_size
            head = 4 * words if job.quantized is not None and item == 4 else 0  # still there
            found["masks"] = head + (stored + 4) * words
            found["head"] = hidden + 4 * words + max(stored * words, self._head_bytes())
            found["backward"] = hidden + (stored + 4) * experts + 3 * 4 * dense + self._backward_bytes()
        if self.probed:
            logits = 5 * 4 * max(self.probed) * self.vocab
            found["probe"] = states + (stored + 4 * 5 // 3) * experts + 2 * 4 * dense + self._forward_bytes(4)
            found["probed head"] = states + 4 * (1 + len(PROBE_BITS)) * words + logits
        return found

    def _forward_bytes(self, item: int) -> int:
        """What a layer computes for the batches that are under way."""
        batches = self._batches()
        workers = min(len(batches), set_threads(0, self.spec.expert_parameters * item))
        return workers * item * max(batches) * self._features(self.spec.hidden_size)

    def _batches(self) -> list[int]:
        """Tokens of those that go forward together."""
        return [len(batch) * self.lengths[batch.start] for batch in equal_lengths(self.lengths)]

    def _rows(self, tokens: list[int]) -> int:
        """How many of the tokens that go together an expert has to do with."""
        mean = sum(tokens) / max(len(tokens), 1)
        return min(MOST_ROWS, math.ceil(mean * self.spec.top_k / self.spec.num_experts)) or 1

    def _features(self, routed: int) -> int:
        """Numbers a token that a layer makes: `routed` in each of its experts, outputs of other linears, states."""
        hidden = self.spec.hidden_size
        return self.spec.top_k * routed + self.sizes.dense_weights // hidden + 6 * hidden

    def _attention_bytes(self, length: int) -> int:
        heads = self.job.checkpoint.config.get("num_attention_heads")
        return 2 * 4 * length * length * heads if isinstance(heads, int) else 0

    def _head_bytes(self) -> int:
        waiting = self._waiting(self.vocab + self.spec.hidden_size)
        return waiting + 3 * 4 * min(HEAD_TOKENS, max(self.backward)) * self.vocab

    def _backward_bytes(self) -> int:
        """Factors that wait, and what a sequence's backward pass goes through."""
        longest = max(self.backward)
        hidden, inner = self.spec.hidden_size, self.spec.moe_intermediate_size
        through = 4 * longest * self._features(2 * hidden + 5 * inner) + self._attention_bytes(longest)
        return self._waiting(self.spec.top_k * 3 * (hidden + inner)) + through

    def _waiting(self, features: int) -> int:
        """Bytes of factors at most, of so many numbers a token: up to the limit and a sequence's beyond."""
        return min(4 * sum(self.backward) * features, WAITING_BYTES + 4 * max(self.backward) * features)

    def read_bytes(self) -> int:
        """Read from the model and the draft, from disk or page cache."""
        passes = 1 + bool(self.backward) + bool(self.probed)
        stored = self.sizes.expert_bytes // self.sizes.expert_weights
        tied = bool(self.job.checkpoint.config.get("tie_word_embeddings"))
        layers = self.sizes.stored_bytes - (1 if tied else 2) * stored * self.sizes.embedding_weights
        heads = bool(self.backward or self.job.quantized is not None) + bool(self.probed)
        words = (passes + heads) * stored * self.sizes.embedding_weights
        draft = 0
        if self.job.quantized is not None:
            infos = self.job.quantized.checkpoint.tensors.items()
            draft = sum(info.end - info.start for name, info in infos if ".experts." in name)
        return passes * layers + words + draft

    def seconds(self) -> float:
        """On this machine as it is now."""
        spec, sizes = self.spec, self.sizes
        layers = len(spec.moe_layers)
        many, few = (estimate.operations_per_s(self._rows(lengths)) for lengths in (self._batches(), self.backward))
        load = layers * spec.num_experts
        total = STARTUP_S + load * self._load_s() * (1 + bool(self.backward) + bool(self.probed))

        def forward(tokens: int, speed: float) -> float:
            return layers * forward_operations(spec, sizes, tokens) / speed

        tokens = sum(self.lengths)
        total += forward(tokens, many)
        if self.job.quantized is not None:
            ahead = min(tokens, NEXT_LAYER_TOKENS)
            total += load * self._draft_s() + forward(tokens + 2 * ahead, many)
            total += 2 * self._head_s(tokens, many)
        if self.backward:
            total += 3 * forward(sum(self.backward), few) + 3 * self._head_s(sum(self.backward), many)
            total += self._weighing_s()
        if self.probed:
            total += (PROBE_COPIES - 1) * (forward(sum(self.probed), many) + self._head_s(sum(self.probed), many))
        return total

    def _head_s(self, tokens: int, speed: float) -> float:
        return 2.0 * tokens * self.sizes.embedding_weights / speed

    def _weighing_s(self) -> float:
        """Rounding every weight once for all gradients that wait, and counting every sequence's."""
        spec, sizes, count = self.spec, self.sizes, len(self.backward)
        hit = min(1.0, sum(self.backward) / count * spec.top_k / spec.num_experts)
        routed = 4 * sum(self.backward) * spec.top_k * 3 * (spec.hidden_size + spec.moe_intermediate_size)
        logits = 4 * sum(self.backward) * self.vocab
        layers = len(spec.moe_layers)
        rounded = layers * (math.ceil(routed / WAITING_BYTES) * sizes.expert_weights + sizes.dense_weights)
        rounded += math.ceil(logits / WAITING_BYTES) * sizes.embedding_weights
        counted = count * (layers * (hit * sizes.expert_weights + sizes.dense_weights) + sizes.embedding_weights)
        scores, weights = Scores(1, torch.device("cpu")), torch.rand(BLOCK_ROWS, spec.hidden_size)
        scores.open("", BLOCK_ROWS)
        outputs, inputs = torch.rand(8, BLOCK_ROWS), torch.rand(8, spec.hidden_size)
        rounding = estimate.seconds_each(lambda _: rounding_error(weights))
        counting = estimate.seconds_each(lambda _: scores.add("", 0, outputs.T @ inputs, weights))
        return (rounded * rounding + counted * counting) / weights.numel()

    def _load_s(self) -> float:
        """Of one expert: read and in the type of the arithmetic."""
        keys = self.spec.expert_keys()
        dtype = DTYPES[self.job.dtype]
        return estimate.seconds_each(
            lambda place: [
                tensor.to(dtype)
                for tensor in read_expert(self.job.checkpoint, self.spec, *keys[place % len(keys)]).named().values()
            ]
        )

    def _draft_s(self) -> float:
        """Of one expert of the draft: read and dequantised."""
        quantized, keys, dtype = self.job.quantized, self.spec.expert_keys(), DTYPES[self.job.dtype]
        assert quantized is not None
        return estimate.seconds_each(
            lambda place: [quantized.linear(*keys[place % len(keys)], p).dequantized(dtype) for p in PROJECTIONS]
        )


def estimate_profile(job: ProfileJob) -> Estimate:
    """All of it."""
    plan = ProfilePlan(job)
    return Estimate(plan.peak_memory_bytes(), job.data_bytes(), plan.read_bytes(), plan.seconds())
