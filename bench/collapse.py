"""The collapse test: does an overload break streams, or eat the throughput that it needs?

    uv run python bench/collapse.py [--short] [--out DIR]

A server with a pool of 192 pages of 16 tokens on SmolLM2, over HTTP, in a process of its own, gets
open-loop loads with bursts (gamma arrivals, variation 2), in multiples of the rate that saturates
it: in stages of 0.6, 2.5 and 0.4, where after the first 15% of the requests run to their cap
instead of 5%, so that what the engine has learnt of lengths is stale; then 0.5 to 3.0. Beside it,
on the same engine: static batches, dynamic batches, admission of whatever fits, and each admission
policy. Then all of it again in the simulator, with step times that were fitted to an engine.

Goodput: output tokens a second of answers whose first token came within 1 s or 10 times, and whose
further tokens within 3 times, what they take on an idle server.

Prints tables (Markdown), and writes them with all figures and plots to DIR. Exit code 1: a claim
does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import time
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from bench.claims import Claim, claims, drained_after
from bench.experiment import OWN, SHORT, Interference, Measured, Plan, Setting, interfere, measure
from bench.judge import Run, percentile
from bench.machines import Simulated, serving

ROOT = Path(__file__).parents[1]
TIMES = ROOT / "configs/times/smollm2-cpu.toml"
DOCS = ROOT / "docs/collapse"

Machines = dict[str, Measured]  # "engine", "simulator"


async def run_engine(
    setting: Setting, plan: Plan, compile_cache: str | None
) -> tuple[Measured, Interference | None]:
    async with serving(setting.engine(compile_cache), setting.pace) as engine:
        say("the server is ready")
        measured = await measure(engine, setting, plan, say)
        found = None
        if plan.long_every:
            found = await interfere(engine, setting, plan.long_every, say)
    return measured, found


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


# ---- tables ----


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def claims_table(found: list[Claim]) -> str:
    rows = [[c.name, c.wanted, c.found, "pass" if c.holds else "FAIL"] for c in found]
    return table(["claim", "wanted", "found", ""], rows)


def sweep_table(machines: Machines) -> str:
    """By load and discipline."""
    factors = sorted({p.factor for m in machines.values() for p in m.sweep[OWN]})
    rows: list[list[str]] = []
    for name in next(iter(machines.values())).sweep:
        for place, measured in machines.items():
            cells = dict.fromkeys(factors, "")
            for point, run in measured.sweep[name].items():
                good = run.goodput(point.window, measured.limits)
                cells[point.factor] = f"{good:.0f} of {run.throughput(point.window):.0f}"
            rows.append([name, place, *cells.values()])
    return table(["goodput of throughput, tokens/s", "", *(f"{f:g} x" for f in factors)], rows)


def policies_table(machines: Machines) -> str:
    rows: list[list[str]] = []
    for name in next(iter(machines.values())).policies:
        for place, measured in machines.items():
            run, base = measured.policies[name], measured.policies["reserve max"]
            speed, least = run.served.made.sum() / run.end, base.served.made.sum() / base.end
            rows.append(
                [
                    *(name, place, f"{speed:.0f}", f"{speed / least:.2f}"),
                    f"{run.counters['recomputed'] + run.counters['swapped']:.0f}",
                    f"{run.share_again:.1%}",
                    *(f"{percentile(run.served.ttft, p):.1f}" for p in (50, 99)),
                    f"{1e3 * percentile(run.served.per_token, 99):.0f}",
                ]
            )
    header = ["policy", "", "tokens/s", "to reserve max", "preemptions", "recomputed"]
    header += ["TTFT p50, s", "p99, s", "a token p99, ms"]
    return table(header, rows)


def machines_table(machines: Machines) -> str:
    rows = [
        [
            *(place, f"{m.throughput:.0f}", f"{m.rate:.2f}", f"{1e3 * m.limits.per_token / 3:.0f}"),
            f"{1e3 * m.limits.step:.0f} + {1e3 * m.limits.token:.2f} x prompt tokens",
            f"{m.rules.max_queue_wait:.2f}",
        ]
        for place, m in machines.items()
    ]
    header = ["", "saturated tokens/s", "requests/s", "a token alone, ms"]
    header += ["first token alone, ms", "longest wait let in, s"]
    return table(header, rows)


# ---- figures ----


def figures(machines: Machines, found: list[Claim], plan: Plan) -> dict[str, Any]:
    """Everything, for JSON and the plots."""
    names = ("name", "wanted", "found", "holds")
    return {
        "claims": [{name: getattr(claim, name) for name in names} for claim in found],
        "machines": {place: _measured(measured, plan) for place, measured in machines.items()},
    }


def _measured(measured: Measured, plan: Plan) -> dict[str, Any]:
    limits = measured.limits
    return {
        "saturated": measured.throughput,
        "rate": measured.rate,
        "unloaded": {
            "step": limits.step,
            "prompt_token": limits.token,
            "output_token": limits.per_token / 3,
        },
        "bounds": list(accumulate(stage.seconds for stage in plan.stages)),
        "factors": [stage.factor for stage in plan.stages],
        "drained_after": _known(drained_after(measured.stages[OWN], plan)),
        "stages": {name: _stages(run, measured) for name, run in measured.stages.items()},
        "sweep": {
            name: {
                f"{point.factor:g}": _run(run, measured)
                | {
                    "goodput": run.goodput(point.window, limits),
                    "throughput": run.throughput(point.window),
                    "attainment": _known(run.attainment(point.window, limits)),
                }
                for point, run in runs.items()
            }
            for name, runs in measured.sweep.items()
        },
        "policies": {
            name: _run(run, measured) | {"tokens_per_second": run.served.made.sum() / run.end}
            for name, run in measured.policies.items()
        },
    }


def _stages(run: Run, measured: Measured) -> dict[str, Any]:
    """With every request, for the plots."""
    served = run.served
    return _run(run, measured) | {
        "series": run.series,
        "due": served.due.round(3).tolist(),
        "ttft": [_known(round(x, 3)) for x in served.ttft.tolist()],
        "per_token": [_known(round(x, 4)) for x in served.per_token.tolist()],
        "ttft_limit": measured.limits.ttft(served.prompt_tokens).round(3).tolist(),
        "refused": served.refused.tolist(),
    }


def _run(run: Run, measured: Measured) -> dict[str, Any]:
    served = run.served
    return {
        "requests": len(served.due),
        "complete": int(served.complete.sum()),
        "refused": int(served.refused.sum()),
        "within_limits": int(measured.limits.met(served).sum()),
        "ttft": {str(p): _known(percentile(served.ttft, p)) for p in (50, 90, 99)},
        "per_token": {str(p): _known(percentile(served.per_token, p)) for p in (50, 90, 99)},
        "most_preemptions": run.most_preemptions,
        "counters": run.counters,
    }


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="another than the bundled SmolLM2")
    parser.add_argument("--times", type=Path, default=TIMES, help="step times for the simulator")
    parser.add_argument("--out", type=Path, default=DOCS, metavar="DIR")
    parser.add_argument("--compile-cache", metavar="DIR")
    parser.add_argument(
        "--short", action="store_true", help="two minutes instead of a quarter hour"
    )
    arguments = parser.parse_args()
    from bench import plots  # before the work: it may not be installed

    setting = replace(Setting(), model=arguments.model)
    plan = SHORT if arguments.short else Plan()
    measured, interference = asyncio.run(run_engine(setting, plan, arguments.compile_cache))
    machines: Machines = {"engine": measured}
    if arguments.times.exists():
        simulated = Simulated.like(setting.engine(None), arguments.times)
        machines["simulator"] = asyncio.run(measure(simulated, setting, plan, say))
    else:
        say(f"no simulator: there is no {arguments.times}")
    found = claims(measured, setting, plan, interference)
    parts = [claims_table(found), machines_table(machines), sweep_table(machines)]
    if plan.policies:
        parts.append(policies_table(machines))
    text = "\n\n".join(parts) + "\n"
    print(text)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "tables.md").write_text(text, encoding="utf-8")
    results = figures(machines, found, plan)
    (arguments.out / "results.json").write_text(json.dumps(results) + "\n", encoding="utf-8")
    plots.draw(results, arguments.out)
    return 0 if all(claim.holds for claim in found) else 1


if __name__ == "__main__":
    sys.exit(main())
