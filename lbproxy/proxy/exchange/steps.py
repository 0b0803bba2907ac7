"""What an exchange is doing, and what comes next.

step          event                                                         next step
READING       the request was read                                          PLACING
PLACING       placed, and a kept connection is there                        SENT
              placed, and none is there                                     DIALLING
              no endpoint listed its model, and all are asked anew          LOOKING
              there is no place for it                                      OVER
LOOKING       they were asked                                               PLACING
DIALLING      connected                                                     SENT
              failed                                                        PLACING or OVER *
              stranded                                                      BACKING_OFF *
SENT          a head arrived                                                RELAYING
              a short response arrived, complete                            OVER
              the kept connection turned out to be closed                   DIALLING
              failed, refused, or stranded                                  BACKING_OFF or OVER *
              it switches to WebSocket, as it was asked to                  SWITCHED
SWITCHED      closed or broken, whoever did it                              OVER
RELAYING      failed, refused, or stranded before the first of the body     BACKING_OFF or OVER *
              complete, or broken later                                     OVER
BACKING_OFF   the delay before another attempt is over                      PLACING
any           the client left, we stop, a defect of ours                    OVER

* as the balancer says: another attempt, or the end; what is stranded stays where it is if there cannot be another
"""

from __future__ import annotations

from enum import Enum
from typing import Final


class Step(Enum):
    """What an exchange does now."""

    READING = "reading"
    PLACING = "placing"
    LOOKING = "looking for its model"
    DIALLING = "dialling"
    SENT = "sent"
    RELAYING = "relaying"
    SWITCHED = "switched"
    BACKING_OFF = "backing off"
    OVER = "over"


READING: Final = Step.READING
PLACING: Final = Step.PLACING
LOOKING: Final = Step.LOOKING
DIALLING: Final = Step.DIALLING
SENT: Final = Step.SENT
RELAYING: Final = Step.RELAYING
SWITCHED: Final = Step.SWITCHED
BACKING_OFF: Final = Step.BACKING_OFF
OVER: Final = Step.OVER
"""A member's look-up in its Enum takes 440 instructions, and each request changes its step four times."""

NEXT_STEPS: Final = {
    Step.READING: frozenset({Step.PLACING, Step.OVER}),
    Step.PLACING: frozenset({Step.SENT, Step.DIALLING, Step.LOOKING, Step.OVER}),
    Step.LOOKING: frozenset({Step.PLACING, Step.OVER}),
    Step.DIALLING: frozenset({Step.SENT, Step.PLACING, Step.BACKING_OFF, Step.OVER}),
    Step.SENT: frozenset({Step.RELAYING, Step.SWITCHED, Step.DIALLING, Step.BACKING_OFF, Step.OVER}),
    Step.RELAYING: frozenset({Step.BACKING_OFF, Step.OVER}),
    Step.SWITCHED: frozenset({Step.OVER}),
    Step.BACKING_OFF: frozenset({Step.PLACING, Step.OVER}),
    Step.OVER: frozenset(),
}
"""The table above, as tests hold it against what happens."""
