# SPDX-License-Identifier: Apache-2.0
"""Hostile clients and servers, and what others notice of them: `python -m tests.security.hostile --help`.

    clients   the kinds of hostile clients, drawn from all states of a connection, in a process of their own
    servers   the kinds of hostile servers, in another
    honest    the model server whose clients must notice nothing
    friends   those clients: each answer must be its own, and come in time
    target    lbproxy itself: memory, descriptors, what it logged
    measure   the phases of one measurement, and its verdict

lbproxy has a core of its own and everything else another, where the hostile ones stand behind the friends: what friends
wait is lbproxy's doing. A short form is among the tests; the table and the hour are by hand (docs/testing.md).
"""
