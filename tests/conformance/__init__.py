# SPDX-License-Identifier: Apache-2.0
"""HTTP/1.1 as a gateway must speak it: cases as data, and who passes them."""
