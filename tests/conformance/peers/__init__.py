# SPDX-License-Identifier: Apache-2.0
"""What other routers' own tests promise about a router's outside, restated in our words and held against lbproxy."""
