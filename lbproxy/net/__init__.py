"""The wire towards the endpoints: HTTP/1.1 on our own connections, shared by the data path and the probes."""
