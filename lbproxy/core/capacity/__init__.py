"""How much more an endpoint can take now, and how long a request waits there (`room`).

A `Room` is made of what bounds an engine: `slots` (requests that run at once), `lanes` (prefills side by side), what
others have there (`others`), and the requests that are held for it (`line`). What an engine reports overrules what was
predicted. `response_times` and `unread` stand in where nothing can be read of the work.

In: `knowledge.load_model`, which owns a Room for an endpoint. Never: which request gets the room.
"""
