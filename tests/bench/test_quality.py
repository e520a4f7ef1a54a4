from __future__ import annotations

from typing import Any

from moespeq_cli.bench.quality import quality_tables
from moespeq_cli.bench.tables import number, percent


def pack_figures(right: float, acceptance: float | None) -> dict[str, Any]:
    domain = {"acceptance": acceptance, "proposals_judged": 40, "routing_agreement": 0.75, "tokens_per_round": 2.5}
    return {
        "speculation": {"exact_match": 0.5, "identical_answers": 4},
        "draft_alone": {"exact_match": right, "identical_answers": 1},
        "domains": {"maths": domain | {"new_tokens": 9}, "code": domain | {"new_tokens": 9}},
    }


def test_tables_have_a_row_for_each_answerer_and_for_each_domain_of_each_pack() -> None:
    result = {
        "problems": 4,
        "target_alone": {"exact_match": 0.5},
        "packs": {"gptq": pack_figures(0.25, 0.9512), "rtn": pack_figures(0.0, None)},
    }
    assert quality_tables(result).split("\n\n") == [
        "\n".join(
            (
                "| answers by | exact match | token for token as the target alone |",
                "|---|---|---|",
                "| target alone | 50.0 % | 4 of 4 |",
                "| speculation, gptq | 50.0 % | 4 of 4 |",
                "| draft alone, gptq | 25.0 % | 1 of 4 |",
                "| speculation, rtn | 50.0 % | 4 of 4 |",
                "| draft alone, rtn | 0.0 % | 1 of 4 |",
            )
        ),
        "\n".join(
            (
                "| draft | domain | accepted | proposals | experts as the target's | tokens a round |",
                "|---|---|---|---|---|---|",
                "| gptq | maths | 95.12 % | 40 | 75.0 % | 2.50 |",
                "| gptq | code | 95.12 % | 40 | 75.0 % | 2.50 |",
                "| rtn | maths | n/a | 40 | 75.0 % | 2.50 |",
                "| rtn | code | n/a | 40 | 75.0 % | 2.50 |",
            )
        ),
    ]


def test_what_was_not_counted_is_not_available() -> None:
    assert (percent(None), number(None), percent(0.0), number(1.25, 1)) == ("n/a", "n/a", "0.0 %", "1.2")
