"""The commands that speak to a running lbproxy: status, top, drain, undrain, explain.

Imported by: `cli`.
"""
