# SPDX-License-Identifier: Apache-2.0
"""Settings: `parse` turns the text of a settings file into a frozen tree, or reports all of its problems.

It reads no file, no environment but the mapping it is given, no clock and no network. `text` makes plain values of YAML
and `${ENV}`, `tree` says which keys there are, `sections` has one module for each part of it, `values` the numbers with
units, host names and URLs, `shown` what may be shown of a text that may have a secret, `descriptions` what each key is
for, `scenario` the keys of `lbproxy sim`.

Imported by: `commands`, `control`, `core`, `demo`, `driver`, `extras`, `processes`, `proxy`, `sections`, `workers`. It
imports nothing of lbproxy. Never: state. Nothing else in lbproxy imports yaml or pydantic.
"""
