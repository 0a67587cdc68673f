"""Messages with tags, wildcards and probes over post offices, and a transport over them."""
