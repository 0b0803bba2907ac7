# SPDX-License-Identifier: Apache-2.0
"""Load generators that others wrote, through lbproxy: what they report, beside what lbproxy reports of the same run."""
