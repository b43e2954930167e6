"""Plots of the collapse test's figures.

python bench/plots.py docs/collapse          draws again from the results.json there
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

matplotlib.rcParams["svg.hashsalt"] = "collapse"  # the same figures give the same file

STYLES = {"engine": "-", "simulator": "--"}


def draw(results: dict[str, Any], directory: Path) -> None:
    """Write goodput.svg, stages.svg and, if policies were compared, policies.svg."""
    machines = results["machines"]
    _save(goodput(machines), directory / "goodput.svg")
    _save(stages(machines["engine"]), directory / "stages.svg")
    if machines["engine"]["policies"]:
        _save(policies(machines), directory / "policies.svg")


def goodput(machines: dict[str, Any]) -> Figure:
    """Goodput over offered load, both in multiples of what saturates the machine."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for place, measured in machines.items():
        for number, (name, runs) in enumerate(measured["sweep"].items()):
            loads = sorted(runs, key=float)
            axes.plot(
                [float(load) for load in loads],
                [runs[load]["goodput"] / measured["saturated"] for load in loads],
                linestyle=STYLES[place],
                marker="o",
                markersize=4,
                color=f"C{number}",
                label=name if place == "engine" else f"{name}, simulated",
            )
    axes.set_xlabel("offered load / saturated rate")
    axes.set_ylabel("goodput / saturated throughput")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", ncols=2)
    return figure


def stages(measured: dict[str, Any]) -> Figure:
    """Pool, queue and latency over time, through the burst: a column a discipline."""
    columns, end = measured["stages"], measured["bounds"][-1]
    figure = Figure(figsize=(11, 8), layout="constrained")
    grid = figure.subplots(4, len(columns), sharex=True, sharey="row", squeeze=False)
    for column, (name, run) in enumerate(columns.items()):
        pool, queue, first, token = panels = grid[:, column]
        pool.set_title(name, fontsize="medium", pad=18)
        _pool(pool, run["series"])
        queue.plot(run["series"]["at"], run["series"]["running"], label="running")
        queue.plot(run["series"]["at"], run["series"]["waiting"], label="waiting")
        served = [i for i, wait in enumerate(run["ttft"]) if wait is not None]
        due = [run["due"][i] for i in served]
        first.plot(due, [run["ttft"][i] for i in served], ".", label="first token")
        first.plot(due, [run["ttft_limit"][i] for i in served], "_", color="C2", label="its limit")
        refused = [run["due"][i] for i, is_refused in enumerate(run["refused"]) if is_refused]
        bottom, places = [0.03] * len(refused), first.get_xaxis_transform()
        first.plot(refused, bottom, "|", color="C3", label="refused", transform=places)
        first.set_yscale("log")
        token.plot(due, [1e3 * run["per_token"][i] for i in served], ".", label="a further token")
        limit = 3e3 * measured["unloaded"]["output_token"]
        token.axhline(limit, color="C2", linewidth=1, label="limit")
        token.set_xlabel("seconds; requests stand where they were due")
        begins = [0.0, *measured["bounds"][:-1]]
        for begin, factor in zip(begins, measured["factors"], strict=True):
            pool.text(begin, 1.02, f" load {factor:g}", transform=pool.get_xaxis_transform())
        for axes in panels:
            axes.set_xlim(0, end)
            for bound in begins[1:]:
                axes.axvline(bound, color="gray", linewidth=0.8, linestyle=":")
    for axes, unit in zip(grid[:, 0], ("pages", "requests", "s", "ms"), strict=True):
        axes.set_ylabel(unit)
        axes.legend(loc="upper right", fontsize="small")
        if axes.get_yscale() == "linear":
            axes.set_ylim(bottom=0)
    return figure


def _pool(axes: Any, series: dict[str, Any]) -> None:
    axes.stackplot(series["at"], series["held"], series["cached"], labels=["held", "cached"])
    if "reserved" in series:
        pairs = zip(series["held"], series["reserved"], strict=True)
        asked = [held + reserved for held, reserved in pairs]
        axes.plot(series["at"], asked, color="black", linewidth=1, label="held + set aside")


def policies(machines: dict[str, Any]) -> Figure:
    """What each admission policy gives and costs."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    measures = {
        "tokens/s": lambda run: run["tokens_per_second"],
        "preemptions": lambda run: run["counters"]["recomputed"] + run["counters"]["swapped"],
        "first token p99, s": lambda run: run["ttft"]["99"],
    }
    width = 0.8 / len(machines)
    for axes, (title, value) in zip(
        figure.subplots(1, len(measures)), measures.items(), strict=True
    ):
        for number, (place, measured) in enumerate(machines.items()):
            runs = measured["policies"]
            places = [i + number * width for i in range(len(runs))]
            heights = [value(run) or math.nan for run in runs.values()]
            axes.bar(places, heights, width, label=place)
            axes.set_xticks(
                [i + 0.4 - width / 2 for i in range(len(runs))], list(runs), rotation=30, ha="right"
            )
        axes.set_title(title, fontsize="medium")
    figure.axes[0].legend(fontsize="small", loc="lower right")
    return figure


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    draw(json.loads((folder / "results.json").read_text(encoding="utf-8")), folder)
