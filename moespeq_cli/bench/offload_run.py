"""`moespeq bench decode --geometry`: build, compare, print."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moespeq_cli import console
from moespeq_cli.bench.synthetic.models import SPECIAL_IDS, TEXT_IDS
from moespeq_cli.bench.tables import percent
from runtime.config import RunSettings
from runtime.errors import InputError

if TYPE_CHECKING:
    from moespeq_cli.bench.offload import Mode, Sweep
    from runtime.gpu.parts import Toolkit

CONTEXT_MARGIN = 64  # beside prompt and answer
LINK_RECORDS = 32  # that are copied to see how fast the link is

Save = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be measured of a built model; an empty sequence leaves a part out.

    Attributes:
        geometry: a key of the models that can be built.
        layers: fewer layers than the model has; None takes all.
        memories: shares of the BF16 expert bytes for all that experts take of the device, for all ways.
        prompts, prompt_tokens: how many prompts of how many random ids.
        max_new_tokens: of each prompt.
        repeats: runs of each way.
        part_memory: as `memories`, for the parts below.
        ablations: whether parts are left out one by one.
        windows, verifies: tail and verification lengths, each with each.
        weights: (alpha, beta, gamma) of the priority policy.
        first_token: lengths of prompts for which the time to the first token is measured.
        table_context: tokens of the memory table's context; 0 leaves it out.
        disk: folder on the disk from which a part of the experts is read; None leaves it out.
        host_cache: what host memory holds then.
        encodings: of the exact experts, `raw` and `residual`; where residual ones are asked for, all parts but the
            ways, the memory table and the way without the fused kernel have those.
    """

    geometry: str
    layers: int | None = None
    memories: Sequence[str] = ()
    prompts: int = 2
    prompt_tokens: int = 64
    max_new_tokens: int = 64
    repeats: int = 1
    part_memory: str = "51%"
    ablations: bool = False
    windows: Sequence[int] = ()
    verifies: Sequence[int] = ()
    weights: Sequence[tuple[float, float, float]] = ()
    first_token: Sequence[int] = ()
    table_context: int = 0
    disk: Path | None = None
    host_cache: str = "50%"
    encodings: Sequence[str] = ("raw",)

    @property
    def context(self) -> int:
        """Tokens of the KV cache that all of it needs."""
        answered = max(self.prompt_tokens, *self.first_token, 0) + self.max_new_tokens + CONTEXT_MARGIN
        return max(answered, self.table_context)


def parse_weights(text: str) -> list[tuple[float, float, float]]:
    """Weights of the priority policy, such as "0.6/0.3/0.1,1/0/0".

    Raises:
        InputError: not three numbers of 0 or more.
    """
    found = []
    for part in filter(None, map(str.strip, text.split(","))):
        try:
            alpha, beta, gamma = (float(number) for number in part.split("/"))
        except ValueError:
            raise InputError(
                expected="--grid as alpha/beta/gamma, comma-separated", found=repr(part), mend="write 0.6/0.3/0.1,1/0/0"
            ) from None
        RunSettings(alpha=alpha, beta=beta, gamma=gamma)
        found.append((alpha, beta, gamma))
    return found


def decode_built(
    asked: Asked,
    settings: RunSettings,
    save: Save,
    toolkit: Callable[[bool], Toolkit] | None = None,
    device_bytes: int | None = None,
    **sizes: int,
) -> dict[str, Any]:
    """Measure a built model on the GPU.

    Args:
        asked: what of it.
        settings: what all ways share.
        save: is given the raw figures again after every way, so that a run that is stopped leaves what it measured.
        toolkit: makes what computes, with recorded passes or without; None takes the GPU.
        device_bytes: memory to plan with; None asks the GPU.
        sizes: other sizes than the model's.

    Returns:
        The raw figures.

    Raises:
        KernelError: no GPU that will do.
        InputError: no such geometry, or less memory than the draft takes.
        PlanError: the model does not fit.
        StorageError: the disk does not take the experts.
        RuntimeError: a way changed the text.
    """
    from moespeq_cli.bench import offload
    from moespeq_cli.bench.environment import gpu_environment
    from moespeq_cli.bench.link import copy_bytes_per_s
    from moespeq_cli.bench.synthetic.models import make_config
    from moespeq_cli.bench.synthetic.parts import build_encodings
    from runtime.gpu.host_tier import Arena
    from runtime.gpu.parts import Toolkit
    from runtime.kernels.device import current_gpu

    if toolkit is None:
        current_gpu()
    config = make_config(asked.geometry, asked.layers, **sizes)
    settings = dataclasses.replace(settings, context=asked.context, speculate=True)
    started = time.perf_counter()
    with console.progress("layers of experts", config.num_hidden_layers) as bar:
        tools = Toolkit.cuda(settings) if toolkit is None else toolkit(True)
        residual = "residual" in asked.encodings
        made = build_encodings(config, tools, asked.context, advance=bar.advance, residual=residual)
    built_s = time.perf_counter() - started
    prompts = offload.make_prompts(asked.prompts, asked.prompt_tokens, max(SPECIAL_IDS) + 1, TEXT_IDS)
    runs = (prompts, asked.max_new_tokens, asked.repeats, toolkit, device_bytes, made.get("residual"))
    sweep = offload.Sweep(made["raw"], settings, *runs)
    keys, arena = sweep.spec.expert_keys(), made["raw"].tier
    assert isinstance(arena, Arena)
    sources = [arena.record(key) for key in keys[:: max(1, len(keys) // LINK_RECORDS)]]  # from all over it
    result: dict[str, Any] = {
        "environment_gpu": gpu_environment() if toolkit is None else None,
        "host_memory_numa": {name: dataclasses.asdict(parts.tier.nearness()) for name, parts in made.items()},
        "asked": dataclasses.asdict(asked) | {"disk": asked.disk is not None},
        "geometry": asked.geometry,
        "layers": config.num_hidden_layers,
        "expert_bytes": sweep.expert_bytes,
        "draft_bytes": sweep.draft_bytes,
        "dense_bytes": sweep.model.dense_bytes,
        "residual": sweep.records(),
        "built_s": built_s,
        "link_bytes_per_s": copy_bytes_per_s(tools.accelerator, sources),
        "settings": dataclasses.asdict(settings),
    }
    try:
        _Measuring(asked, sweep, result, save).run()
    finally:
        for parts in made.values():
            parts.tier.close()
    return result


class _Measuring:
    """The parts in turn; what is measured is saved at once."""

    def __init__(self, asked: Asked, sweep: Sweep, result: dict[str, Any], save: Save) -> None:
        from moespeq_cli.bench.offload_compare import Comparison

        self._asked, self._sweep, self._result, self._save = asked, sweep, result, save
        self._comparison = Comparison()
        self._advance: Callable[[], None] = lambda: None

    def run(self) -> None:
        """Measure everything that was asked for."""
        from moespeq_cli.bench import offload, offload_memory

        asked, sweep = self._asked, self._sweep
        ways, memory = offload.modes(asked.encodings), asked.part_memory
        look, encoding = ways[-1], ways[-1].encoding
        parts: dict[str, list[Mode]] = {
            "windows": [_window(w, v) for w in asked.windows for v in asked.verifies],
            "ablations": [look, *offload.ABLATIONS] if asked.ablations else [],
            "grid": [_priority(*weights) for weights in asked.weights],
        }
        last = self._unfused() if asked.ablations else []
        for part, more in parts.items():
            parts[part] = [replace(mode, encoding=encoding) for mode in more]
        steps = offload_memory.STEPS if asked.table_context else ()
        on_disk = [look, replace(ways[1], encoding=encoding)] if asked.disk is not None else []
        total = len(asked.memories) * len(ways) + sum(map(len, parts.values())) + len(asked.first_token)
        total += len(last) + len(steps) + (1 + len(on_disk) if on_disk else 0)
        self._announce(total)
        sweep.settings(look, memory)  # refused now, not after all that comes before it
        with console.progress("ways", total) as bar:
            self._advance = bar.advance
            self._comparison.run(sweep, asked.memories, ways, self._keep("modes"))
            for part, more in parts.items():
                self._comparison.run(sweep, [memory], more, self._keep(part))
            for length in asked.first_token:
                self._keep("first_token")(offload.first_token(sweep, memory, length))
            if steps:
                offload_memory.memory_table(sweep, memory, asked.table_context, self._keep("memory"), steps)
            if on_disk:
                self._comparison.run(sweep, [memory], [look], self._keep("disk"))
                with self._disk(encoding) as halved:
                    self._comparison.run(halved, [memory], on_disk, self._keep("disk"))
            self._comparison.run(sweep, [memory], last, self._keep("ablations"))

    def _unfused(self) -> list[Mode]:
        """The way without the fused kernel, where the GPU has another for few tokens."""
        from moespeq_cli.bench.offload import UNFUSED
        from moespeq_cli.bench.offload_kernels import can_multiply

        facts = self._result["environment_gpu"]
        return [UNFUSED] if facts is not None and can_multiply(facts["compute_capability"]) else []

    def _announce(self, total: int) -> None:
        asked, sweep = self._asked, self._sweep
        console.note(
            f"built in {self._result['built_s']:.0f} s; draft {sweep.draft_bytes / 1e9:.2f} GB, "
            f"{sweep.draft_bytes / sweep.expert_bytes:.1%} of {sweep.expert_bytes / 1e9:.2f} GB of experts; "
            f"{_records_line(sweep.records())}{total} ways, {asked.prompts} prompts of {asked.prompt_tokens} tokens, "
            f"{asked.max_new_tokens} new tokens each, {asked.repeats} repeats"
        )

    def _keep(self, part: str) -> Save:
        rows = self._result.setdefault(part, [])

        def done(row: dict[str, Any]) -> None:
            rows.append(row)
            if row.get("bytes_per_token") is not None:
                moved = row["bytes_per_token"] / self._result["link_bytes_per_s"]
                row["link_share"] = 1e3 * moved / row["ms_per_token"]
            if row.get("acceptance") is not None and "draft" not in self._result:
                alike = {"experts_alike": row["routing_agreement"], "greedy_alike": row["acceptance"]}
                self._result["draft"] = {"mode": row["mode"], "memory": row["memory"]} | alike
            self._result["compared"] = self._comparison.as_json()
            self._save(self._result)
            self._advance()

        return done

    @contextmanager
    def _disk(self, encoding: str) -> Iterator[Sweep]:
        """The same model with its experts on a disk, as long as the context."""
        from moespeq_cli.bench.offload_disk import records_on_disk

        assert self._asked.disk is not None
        started = time.perf_counter()
        with records_on_disk(self._sweep.made(encoding), self._asked.disk) as store:
            self._result["disk_written_s"] = time.perf_counter() - started
            self._result["disk_direct"] = store.direct
            yield self._sweep.on_disk(store, self._asked.host_cache)


def _records_line(records: dict[str, Any]) -> str:
    if not records:
        return ""
    bits, kept = records["bits_per_weight"], records["raw_records"]
    return f"residual records of {'no' if bits is None else f'{bits:.2f}'} bits a weight, {kept} raw; "


def _window(window: int, verify: int) -> Mode:
    from moespeq_cli.bench.offload import Mode

    changes = {"prefetch_window": window, "verify_window": verify, "governor": "fixed"}
    return Mode(f"window {window}, verify {verify}", changes)


def _priority(alpha: float, beta: float, gamma: float) -> Mode:
    from moespeq_cli.bench.offload import Mode

    changes = {"eviction": "priority", "alpha": alpha, "beta": beta, "gamma": gamma}
    return Mode(f"priority {alpha:g}/{beta:g}/{gamma:g}", changes)


def print_built(result: dict[str, Any]) -> None:
    """The figures as tables on stdout."""
    from moespeq_cli.bench import offload_tables as tables

    memory = result["asked"]["part_memory"]
    compared, draft = result.get("compared", {}), result.get("draft", {})
    if compared.get("ways"):
        routing = compared["routing"]
        print(
            f"{compared['ways']} ways gave the same {compared['tokens']} tokens. Routing over {routing['rows']} rows: "
            f"entropy {percent(routing['entropy'])} of its maximum, neighbours share {percent(routing['neighbours'])}, "
            f"draft's experts as the target's {percent(draft.get('experts_alike'))}, next tokens "
            f"{percent(draft.get('greedy_alike'))}"
        )
    titles = {"modes": "Ways", "ablations": f"Parts left out, {memory}", "grid": f"alpha / beta / gamma, {memory}"}
    for part, title in titles.items():
        if result.get(part):
            print(f"\n{title}:\n\n{tables.ways(result[part])}")
    if result.get("windows"):
        print(f"\nWindow and verification, {memory}:\n\n{tables.windows(result['windows'])}")
    if result.get("first_token"):
        print(f"\nFirst token, {memory}, cache empty:\n\n{tables.first_tokens(result['first_token'])}")
    if result.get("memory"):
        context = result["asked"]["table_context"]
        print(f"\nDevice memory at {context} tokens, {memory}:\n\n{tables.memory(result['memory'])}")
    if result.get("disk"):
        where = "past the page cache" if result.get("disk_direct") else "through the page cache"
        print(f"\nExperts on disk, read {where}, {memory}:\n\n{tables.disk(result['disk'])}")
