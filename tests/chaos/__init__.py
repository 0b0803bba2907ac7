# SPDX-License-Identifier: Apache-2.0
"""Faults that a balancer must survive, each with figures: docs/reliability.md."""
