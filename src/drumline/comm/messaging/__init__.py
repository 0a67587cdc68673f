"""Messages with tags, wildcards and probes over endpoints, and a transport on top."""
