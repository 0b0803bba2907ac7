# SPDX-License-Identifier: Apache-2.0
"""The command line: `cli` reads the arguments, and each other module is a command or serves some.

`check` and `sim` are commands by those names. `operate` has those that speak to a running lbproxy by its admin API
(status, drain, sleep, wake, explain, ...) and `top` the live table; both use `client` and `tables`.

Imported by: `__main__`.
"""
