# SPDX-License-Identifier: Apache-2.0
"""lbproxy: a load balancer for LLM servers."""

__version__ = "0.2.0"
