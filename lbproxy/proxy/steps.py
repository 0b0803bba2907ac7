"""What an exchange is doing, and what comes next.

step          event                                                         next step
PLACING       placed, and a kept connection is there                        SENT
              placed, and none is there                                     DIALLING
              there is no place for it                                      OVER
DIALLING      connected                                                     SENT
              failed                                                        PLACING, BACKING_OFF or OVER *
SENT          a head arrived                                                RELAYING
              a short response arrived, complete                            OVER
              the kept connection turned out to be closed                   DIALLING
              failed, refused, or stranded                                  PLACING, BACKING_OFF or OVER *
RELAYING      failed, refused, or stranded before the first of the body     PLACING, BACKING_OFF or OVER *
              complete, or broken later                                     OVER
BACKING_OFF   the delay before another attempt is over                      PLACING
any           the client left, we stop, a defect of ours                    OVER

* as the balancer says: another attempt, at once or later, or the end
"""

from __future__ import annotations

from enum import Enum
from typing import Final


class Step(Enum):
    """What an exchange does now."""

    PLACING = "placing"
    DIALLING = "dialling"
    SENT = "sent"
    RELAYING = "relaying"
    BACKING_OFF = "backing off"
    OVER = "over"


_AGAIN: Final = frozenset({Step.PLACING, Step.BACKING_OFF, Step.OVER})
NEXT_STEPS: Final = {
    Step.PLACING: frozenset({Step.SENT, Step.DIALLING, Step.OVER}),
    Step.DIALLING: _AGAIN | {Step.SENT},
    Step.SENT: _AGAIN | {Step.RELAYING, Step.DIALLING},
    Step.RELAYING: _AGAIN,
    Step.BACKING_OFF: frozenset({Step.PLACING, Step.OVER}),
    Step.OVER: frozenset({Step.OVER}),
}
"""The table above, as tests hold it against what happens."""
