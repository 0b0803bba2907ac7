# SPDX-License-Identifier: Apache-2.0
"""`lbproxy demo`: simulated servers and lbproxy before them; with `--traffic` also clients, and a bad night;
with `--replicas` several lbproxies.

Imported by: `commands`.
"""
