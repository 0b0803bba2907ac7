# SPDX-License-Identifier: Apache-2.0
"""What an exchange is doing, and what comes next. Tests hold each change against this table.

    step          event                                                         next step
    READING       the request was read                                          PLACING
    PLACING       placed, and there is a kept connection                        SENT
                  placed, and there is none                                     DIALLING
                  no endpoint listed its model, and all are asked again         LOOKING
                  there is no place for it                                      FINISHED
                  placed to be split                                            PREFILLING
                  placed to go on with a text, whose tokens are counted first   COUNTING
                  a second leg is placed, and prefill is gone: placed whole     PLACING
    LOOKING       they were asked                                               PLACING
    PREFILLING    prefilled, or cannot be split                                 PLACING
                  the second leg can be sent as well                            SENT or DIALLING
                  failed, or stranded                                           BACKING_OFF or FINISHED *
    COUNTING      counted, or it cannot be                                      SENT or DIALLING
                  counted, and that is all of the response                      RELAYING
                  stranded                                                      BACKING_OFF *
    DIALLING      connected                                                     SENT
                  failed                                                        PLACING or FINISHED *
                  stranded                                                      BACKING_OFF *
    SENT          a head arrived                                                RELAYING
                  a short response arrived, complete                            FINISHED
                  the kept connection turned out to be closed                   DIALLING
                  it refuses to be asked for usage                              SENT or DIALLING
                  failed, refused, or stranded                                  BACKING_OFF or FINISHED *
                  a second leg failed, and the request is placed whole          PLACING
                  the endpoint switched to WebSocket, as requested              SWITCHED
    SWITCHED      closed or broken by any side                                  FINISHED
    RELAYING      failed, refused, or stranded before the first of the body     BACKING_OFF or FINISHED *
                  a second leg failed before that, as above                     PLACING
                  complete, or broken later                                     FINISHED
    BACKING_OFF   the delay before the next attempt has passed                  PLACING
    any           the client left, lbproxy stops, a defect                      FINISHED

* as the balancer decides: another attempt, or the end. A stranded request stays where it is if it cannot be retried.
"""

from __future__ import annotations

from enum import Enum
from typing import Final


class Step(Enum):
    """What an exchange does now."""

    READING = "reading"
    PLACING = "placing"
    LOOKING = "looking for its model"
    PREFILLING = "prefilling"
    COUNTING = "counting tokens"
    DIALLING = "dialling"
    SENT = "sent"
    RELAYING = "relaying"
    SWITCHED = "switched"
    BACKING_OFF = "backing off"
    FINISHED = "over"


READING: Final = Step.READING
PLACING: Final = Step.PLACING
LOOKING: Final = Step.LOOKING
PREFILLING: Final = Step.PREFILLING
COUNTING: Final = Step.COUNTING
DIALLING: Final = Step.DIALLING
SENT: Final = Step.SENT
RELAYING: Final = Step.RELAYING
SWITCHED: Final = Step.SWITCHED
BACKING_OFF: Final = Step.BACKING_OFF
FINISHED: Final = Step.FINISHED
"""A look-up in an Enum takes 440 instructions, and each request changes its step four times."""
