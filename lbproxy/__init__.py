"""lbproxy: a load balancer for LLM servers."""

__version__ = "0.2.0"
