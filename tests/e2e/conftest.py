# SPDX-License-Identifier: Apache-2.0
"""What processes and real clients run with."""

from tests.support.authorities import few_authorities

__all__ = ["few_authorities"]
