# SPDX-License-Identifier: Apache-2.0
"""Pictures of a comparison. The only module that knows matplotlib, which is an extra: `pip install '.[plots]'`.

It is imported when a picture is asked for, and not before. Nothing is written here: the picture's bytes are returned.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from statistics import fmean

from lbproxy.sim.figures.report import Summary

FORMS = ("png", "svg", "pdf")
PANELS: tuple[tuple[str, str, bool], ...] = (
    ("ttft_mean", "mean time to first token, s", True),
    ("ttft_p90", "90th percentile of it, s", True),
    ("output_tokens_s", "output tokens a second", False),
    ("goodput", "share with TTFT within 1 s, TPOT within 50 ms", False),
)
"""Figure, title, logarithmic."""


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def plot(results: Mapping[str, Sequence[Mapping[str, Summary]]], *, title: str, form: str) -> bytes:
    """Four panels, a line for each policy over the workload's phases (mean over runs), or bars if there is one phase.

    `results`: by policy, the runs' phases; every run has the same ones. `form`: one of `FORMS`. Raises ImportError
    without matplotlib.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra, and slow to import

    figure = Figure(figsize=(12, 8), layout="constrained")
    figure.suptitle(title)
    phases = list(next(iter(results.values()))[0])
    for axes, (name, heading, logarithmic) in zip(figure.subplots(2, 2).flat, PANELS, strict=True):
        axes.set_title(heading)
        for number, (policy, runs) in enumerate(results.items()):
            means = [fmean(getattr(run[phase], name) for run in runs) for phase in phases]
            if len(phases) > 1:
                axes.plot(phases, means, marker="o", markersize=3, label=policy)
            else:
                axes.bar(number, means, label=policy)
        if logarithmic:
            axes.set_yscale("log")
        if len(phases) > 1:
            axes.tick_params(axis="x", rotation=60)
        else:
            axes.set_xticks([])
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    picture = io.BytesIO()
    figure.savefig(picture, format=form)
    return picture.getvalue()
