"""The pure core: it decides, and it never looks at a clock, a socket or an event loop."""
