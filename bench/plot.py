"""Draws what test_grid of test_replay_gpu.py measured: `python bench/plot.py results/x.json results/x.png`. For the README."""

import json
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"held by the graph": "#1b7f5c", "held by the executable": "#c0392b"}
FLOOR = "no owners"


def main(source, target):
    with open(source) as file:
        grid = json.load(file)
    figure, axes = plt.subplots(1, 2, figsize=(10.5, 3.8), sharex=True)
    segments = sorted({row["segments"] for row in grid["rows"]})
    marks = dict(zip(segments, "osD^", strict=False))
    for column, (axis, title) in enumerate(
        zip(axes, ("host: until it is free again", "whole: until the GPU is done"), strict=True)
    ):
        for way, colour in COLOURS.items():
            for count in segments:
                rows = [row for row in grid["rows"] if row["segments"] == count]
                x = [row["kernels"] for row in rows]
                y = [row["microseconds"][way][column] / row["microseconds"][FLOOR][column] for row in rows]
                label = f"{way}, {count} segment{'s' * (count > 1)}" if column == 0 else None
                axis.plot(x, y, marks[count], color=colour, linestyle="-", linewidth=1, markersize=4, alpha=0.85, label=label)
        axis.axhline(1, color="#888888", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("kernels in a segment")
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("time of a step, against no owners")
    axes[0].xaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
    figure.legend(loc="center right", fontsize=8, frameon=False)
    figure.suptitle(f"90 owners a step, {grid['device']}, torch {grid['torch']}", fontsize=10)
    figure.subplots_adjust(right=0.73, left=0.06, bottom=0.14, top=0.86, wspace=0.17)
    figure.savefig(target, dpi=130)


if __name__ == "__main__":
    main(*sys.argv[1:])
