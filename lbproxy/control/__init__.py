"""The control plane: what looks after the endpoints, and what tells people and machines how lbproxy is doing."""
