# SPDX-License-Identifier: Apache-2.0
"""The dashboard: one page that lives on the admin API. `page` puts its HTML, style and script together.

Imported by: `admin`.
"""
