"""`moespeq bench decode --geometry`: build, compare, print."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from moespeq_cli import console
from moespeq_cli.bench.synthetic.models import SPECIAL_IDS, TEXT_IDS
from moespeq_cli.bench.tables import percent
from runtime.config import RunSettings

CONTEXT_MARGIN = 64  # beside prompt and answer


Save = Callable[[dict[str, Any]], None]


def decode_built(
    geometry: str,
    layers: int | None,
    memories: Sequence[str],
    settings: RunSettings,
    *,
    prompts: int,
    prompt_tokens: int,
    max_new_tokens: int,
    repeats: int,
    windows: Sequence[int],
    verifies: Sequence[int],
    window_memory: str,
    ablations: bool,
    first_token: Sequence[int],
    save: Save,
    encodings: Sequence[str] = ("raw",),
) -> None:
    """Measure a built model on the GPU and print the tables.

    Args:
        geometry: a key of the models that can be built.
        layers: fewer layers than the model has; None takes all.
        memories: shares of the BF16 expert bytes for all that experts take of the device.
        settings: what all ways share.
        prompts, prompt_tokens: how many prompts of how many random ids.
        max_new_tokens: of each prompt.
        repeats: runs of each way.
        windows, verifies: of the sweep at `window_memory`; nothing without either.
        ablations: whether parts are left out, at `window_memory`.
        first_token: lengths of prompts for which the time to the first token is measured.
        save: is given the raw figures again after every way, so that a run that is stopped leaves what it measured.
        encodings: of the exact experts, `raw` and `residual`; ablations, windows and first tokens have residual ones
            where they are asked for.

    Raises:
        KernelError: no GPU that will do.
        InputError: no such geometry, or less memory than the draft takes.
        RuntimeError: a way changed the text.
    """
    from moespeq_cli.bench import offload
    from moespeq_cli.bench.environment import gpu_environment
    from moespeq_cli.bench.synthetic.models import make_config
    from moespeq_cli.bench.synthetic.parts import build_encodings
    from runtime.gpu.engine import Toolkit
    from runtime.kernels.device import current_gpu

    current_gpu()
    config = make_config(geometry, layers)
    needed = max(prompt_tokens, *first_token, 0) + max_new_tokens + CONTEXT_MARGIN
    settings = dataclasses.replace(settings, context=needed, speculate=True)
    started = time.perf_counter()
    with console.progress("layers of experts", config.num_hidden_layers) as bar:
        made = build_encodings(
            config, Toolkit.cuda(settings), needed, advance=bar.advance, residual="residual" in encodings
        )
    built_s = time.perf_counter() - started
    asked = offload.make_prompts(prompts, prompt_tokens, max(SPECIAL_IDS) + 1, TEXT_IDS)
    sweep = offload.Sweep(made["raw"], settings, asked, max_new_tokens, repeats, residual=made.get("residual"))
    ways = offload.modes(encodings)
    sweep.settings(ways[-1], window_memory)  # refused now, not after all that comes before it
    encoding = ways[-1].encoding
    left_out = [ways[-1], *offload.ABLATIONS] if ablations else []
    grid = [
        offload.Mode(f"{w}/{v}", {"prefetch_window": w, "verify_window": v, "governor": "fixed"})
        for w in windows
        for v in verifies
    ]
    left_out, grid = ([dataclasses.replace(mode, encoding=encoding) for mode in part] for part in (left_out, grid))
    total = len(memories) * len(ways) + len(left_out) + len(grid) + len(first_token)
    console.note(
        f"built in {built_s:.0f} s; draft {sweep.draft_bytes / 1e9:.2f} GB, "
        f"{sweep.draft_bytes / sweep.expert_bytes:.1%} of {sweep.expert_bytes / 1e9:.2f} GB of experts; "
        f"{_records_line(sweep.records())}"
        f"{total} ways, {prompts} prompts of {prompt_tokens} tokens, {max_new_tokens} new tokens each, "
        f"{repeats} repeats"
    )
    result: dict[str, Any] = {
        "environment_gpu": gpu_environment(),
        "geometry": geometry,
        "layers": config.num_hidden_layers,
        "expert_bytes": sweep.expert_bytes,
        "draft_bytes": sweep.draft_bytes,
        "residual": sweep.records(),
        "built_s": built_s,
        "prompts": prompts,
        "prompt_tokens": prompt_tokens,
        "max_new_tokens": max_new_tokens,
        "repeats": repeats,
        "settings": dataclasses.asdict(settings),
        "routing": {},
        "modes": [],
        "ablations": [],
        "windows": [],
        "first_token": [],
    }
    try:
        with console.progress("ways", total) as bar:

            def keep(part: str) -> Save:
                def done(row: dict[str, Any]) -> None:
                    result[part].append(row)
                    save(result)
                    bar.advance()

                return done

            _, routing = offload.compare(sweep, memories, ways, keep("modes"))
            look = next(row for row in result["modes"] if row["mode"] == ways[-1].name)
            alike = {"experts_alike": look["routing_agreement"], "greedy_alike": look["acceptance"]}
            result["routing"] = routing | alike
            for part, more in (("ablations", left_out), ("windows", grid)):
                if more:
                    offload.compare(sweep, [window_memory], more, keep(part))
            for length in first_token:
                keep("first_token")(offload.first_token(sweep, window_memory, length))
    finally:
        for parts in made.values():
            parts.tier.close()
    _print(result, window_memory)


def _records_line(records: dict[str, Any]) -> str:
    if not records:
        return ""
    bits, kept = records["bits_per_weight"], records["raw_records"]
    return f"residual records of {'no' if bits is None else f'{bits:.2f}'} bits a weight, {kept} raw; "


def _print(result: dict[str, Any], memory: str) -> None:
    from moespeq_cli.bench.offload import first_token_table, table

    routing = result["routing"]
    print(
        f"Routing over {routing['rows']} rows: entropy {percent(routing['entropy'])} of its maximum, neighbours share "
        f"{percent(routing['neighbours'])}, draft's experts as the target's {percent(routing['experts_alike'])}, next "
        f"tokens {percent(routing['greedy_alike'])}\n"
    )
    print(table(result["modes"]))
    if result["ablations"]:
        print(f"\nParts left out, {memory}:\n\n{table(result['ablations'])}")
    if result["windows"]:
        print(f"\nWindow / verified, {memory}:\n\n{table(result['windows'])}")
    if result["first_token"]:
        print(f"\nFirst token, {memory}, cache empty:\n\n{first_token_table(result['first_token'])}")
