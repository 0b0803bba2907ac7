# SPDX-License-Identifier: Apache-2.0
"""The parts of the settings tree: one module for each subject, in the order of config.example.yaml.

A class is a section, its fields are keys with their defaults, and the docstring below a field is its documentation.

Imported by: `balancing`, `commands`, `control`, `core`, `demo`, `extras`, `net`, `parse`, `processes`, `proxy`,
`scenario`, `tree`, `workers`. Never: what the settings do. A new key is a field here, a line in config.example.yaml and
a row that the tests write into docs/configuration.md.
"""
