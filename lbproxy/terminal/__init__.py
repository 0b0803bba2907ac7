# SPDX-License-Identifier: Apache-2.0
"""The commands that speak to a running lbproxy: status, top, drain, undrain, sleep, wake, explain,
dashboard, admin-token.

Imported by: `cli`.
"""
