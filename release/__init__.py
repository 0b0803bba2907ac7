# SPDX-License-Identifier: Apache-2.0
"""What makes a release: wheels, the same byte for byte from every build, and the test that they install and run.

`make wheels`, `make wheels-check`, `make wheels-test` and `make sbom` call it; docs/releasing.md says when. Nothing of
it is in a wheel.
"""
