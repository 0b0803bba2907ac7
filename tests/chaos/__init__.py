"""Faults that a balancer must survive, each with figures: docs/reliability.md."""
