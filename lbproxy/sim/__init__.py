"""A model of continuous-batching LLM servers, in virtual time or behind HTTP. Only `sim.http` does I/O."""
