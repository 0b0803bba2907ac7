"""The dashboard: one page that lives on the admin API. `page` puts its HTML, style and script together.

Imported by: `admin`.
"""
