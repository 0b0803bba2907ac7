"""The data plane: clients in front, endpoints behind, one exchange for each request."""
