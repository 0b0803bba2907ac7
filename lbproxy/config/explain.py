"""Settings of what is remembered of decisions."""

from __future__ import annotations

from typing import Annotated

from lbproxy.config.section import Section
from lbproxy.config.values import count


class ExplainSettings(Section):
    """Why requests went where they went: `lbproxy explain`, /admin/decisions."""

    requests: Annotated[int, count("0", "100000")] = 1000
    """Recent requests that are remembered with their decisions, 1 to 6 KB each. 0 = none."""
    header: bool = False
    """A request with `x-lbproxy-explain: 1` gets the decision in a header of that name, if expose_endpoint is true too.
    It tells clients of the fleet's names and load."""

    @property
    def wanted(self) -> bool:
        """Whether decisions have to say why."""
        return self.header or self.requests > 0
