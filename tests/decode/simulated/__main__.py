"""What numbers of proposals cost on a virtual clock, governors beside fixed ones.

    python -m tests.decode.simulated --memory 40%,51%,75% --encoding residual,raw --governor roofline \\
        --fixed 0,1,3,5,7 --texts 6 --tokens 64 --window 16 --json simulated.json

Qwen1.5-MoE on an H200. A line is a way: milliseconds and gigabytes a token, means over the texts (least-most), tokens a
round, and the share of the time that the bytes take on the link. Each text has a seed, the same for all ways; prompts
are not counted. `--slow-host` takes a host 1.4 to 2 times as slow. This takes half a minute.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from runtime.decode.governor import GOVERNORS, Governor, make_governor
from tests.decode.simulated.constants import ENCODINGS, H200, QWEN1_5_MOE, SLOW_HOST
from tests.decode.simulated.routing import Routing
from tests.decode.simulated.world import Figures, Run, simulate

PROPOSALS = 7  # that governors may verify


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate and print; the file is written last."""
    asked = _parse(arguments)
    model, costs = QWEN1_5_MOE, SLOW_HOST if asked.slow_host else H200
    rows: list[dict[str, Any]] = []
    texts: list[Routing] = []
    heads = "".join(head.rjust(width) for head, width in (("ms a token", 22), ("GB a token", 22), ("a round", 9)))
    print(f"{'encoding':9}{'memory':>7}{'slots':>6}  {'way':10}{heads}  link")
    for encoding in asked.encoding:
        for memory in asked.memory:
            slots = model.slots(memory, encoding)
            run = Run(model, slots, model.record(encoding), tokens=asked.tokens, window=asked.window, costs=costs)
            texts = texts or [run.routing(seed) for seed in range(asked.texts)]  # of all sizes the same
            for name, make in _ways(asked):
                figures = [simulate(run, make(), text) for text in texts]
                print(f"{encoding:9}{memory:7.0%}{slots:6}  {name:10}{_line(figures)}", flush=True)
                row = {"encoding": encoding, "memory": memory, "slots": slots, "way": name}
                rows.append(row | {"texts": [asdict(one) for one in figures]})
    if asked.json:
        result = {
            "asked": {name: str(value) for name, value in vars(asked).items()},
            "model": asdict(model),
            "costs": asdict(costs),
            "rows": rows,
        }
        asked.json.write_text(json.dumps(result, indent=1), encoding="utf-8")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=_shares, default="40%,51%,75%", help="of the BF16 experts' bytes")
    parser.add_argument("--encoding", type=_names(ENCODINGS), default="residual,raw")
    parser.add_argument("--governor", type=_names(GOVERNORS), default="roofline", help=f"up to {PROPOSALS} proposals")
    parser.add_argument("--fixed", type=_numbers, default="0,1,3,5,7", help="numbers of proposals, '' for none")
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64, help="new ones of each text")
    parser.add_argument("--window", type=int, default=16, help="tokens of tail")
    parser.add_argument("--slow-host", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    if asked.texts < 1 or asked.tokens < 1:
        parser.error("at least one text of one token")
    for memory in asked.memory:
        for encoding in asked.encoding:
            model = QWEN1_5_MOE
            run = Run(model, model.slots(memory, encoding), model.record(encoding))
            if run.slots < run.fewest_slots:
                parser.error(
                    f"{memory:.0%} leave {run.slots} slots for {encoding} records, a pass needs {run.fewest_slots}"
                )
    return asked


def _shares(text: str) -> list[float]:
    return [float(part.removesuffix("%")) / 100 for part in text.split(",")]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _names(known: Sequence[str]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        found = [part for part in text.split(",") if part]
        if unknown := set(found) - set(known):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))} not among {', '.join(known)}")
        return found

    return names


def _ways(asked: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Governor]]]:
    for number in asked.fixed:
        yield f"fixed {number}", partial(make_governor, "fixed", number)
    for name in asked.governor:
        yield name, partial(make_governor, name, PROPOSALS)


def _line(figures: Sequence[Figures]) -> str:
    times, sizes = [one.ms for one in figures], [one.gb for one in figures]
    return (
        f"{mean(times):8.2f} ({min(times):.2f}-{max(times):.2f})".rjust(22)
        + f"{mean(sizes):8.3f} ({min(sizes):.3f}-{max(sizes):.3f})".rjust(22)
        + f"{mean(one.tokens_per_round for one in figures):9.1f}{mean(one.link for one in figures):6.0%}"
    )


if __name__ == "__main__":
    main()
