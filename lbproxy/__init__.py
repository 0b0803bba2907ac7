"""lbproxy: a load balancer for LLM servers."""

__version__ = "0.1.0"
